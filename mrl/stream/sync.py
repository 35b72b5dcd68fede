"""WeightSync: pushes of the trainer's weights to the engines, as every trainer rank sees them."""
from __future__ import annotations

import json
import logging
import os
import socket
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, Optional

import torch.distributed as dist

from mrl.config.schema import Experiment
from mrl.engine.api import Version
from mrl.receiver.mrl_receiver.disk import discard
from mrl.receiver.mrl_receiver.links import address_towards
from mrl.receiver.mrl_receiver.wire import SyncRequest
from mrl.reshard.plan import SyncPlan
from mrl.stream.calls import MARGIN_S, EngineCalls, Round
from mrl.stream.delta import Bases
from mrl.stream.gather import Gatherer
from mrl.stream.links import Links, Target, seats
from mrl.stream.pipeline import label_prefix, stream
from mrl.stream.planning import plan_of, receive_buffers, with_transport
from mrl.stream.report import PushReport, Sent

logger = logging.getLogger(__name__)


class WeightSync:
    """Built on every trainer rank, together, after init_process_group.

    trainer: gives `spec`, `layout`, `te` and `local_params()`. engines: handles of the EngineServer actors on rank 0,
    None elsewhere. host: the address of this machine under which engines reach rank 0; by default 127.0.0.1 when all
    trainer ranks are on one machine, else this machine's address. folder: this run's alone, where the disk transport
    leaves weights on their way; it needs one.
    """

    def __init__(self, experiment: Experiment, trainer: Any, engines: Optional[list], run_id: str,
                 host: Optional[str] = None, folder: Optional[Path] = None):
        device = next(iter(trainer.local_params().values())).device
        experiment = with_transport(experiment, device.type)
        self.experiment, self.settings, self.trainer, self.rank = experiment, experiment.sync, trainer, dist.get_rank()
        transport = self.settings.transport
        self.folder = folder if transport == "disk" else None
        if self.rank == 0:
            self._discard()  # what a gang that died has left, before any rank of this one can write
        self.store, store_host = self._open_store(host)
        self.links = Links(self.rank, self.store, device, folder=self.folder)
        self._plan()
        self.calls: Optional[EngineCalls] = None
        if self.rank == 0:
            self.calls = EngineCalls(engines or [], run_id, self.settings, transport, self.store, store_host)
        self.pushes = 0
        self.left: dict[int, list[str]] = {}  # rank 0: by push, the store keys it has left behind

    def push(self, version: Version, engines: Optional[list[int]] = None) -> PushReport:
        """Bring this rank's weights, as `version`, into all engines (or those named); the same report on every rank.

        Collective over the trainer ranks. An engine that fails is in the report's errors, and one that is not up in
        its absent; it does not disturb the others, and a later push may succeed. Raises when a trainer rank is gone.
        """
        report = self._round(version, engines, believing=True)
        if report.again:
            report = report.followed_by(self._round(version, [*report.again], believing=False))
        return report

    def close(self) -> None:
        """Give up this rank's links; the engines go on serving what they have. The last call, in any state, even twice.

        Not collective. Rank 0 must outlive the others' last push all the same, because it serves the store.
        """
        self.links.close()
        if self.rank == 0:
            self._discard()

    def _round(self, version: Version, engines: Optional[list[int]], believing: bool) -> PushReport:
        """A push to engines as they were last seen (`believing`), if all of them were left with a link that works; else
        to those that are up, which rank 0 asks first. Collective."""
        began, number = time.monotonic(), self.pushes
        self.pushes += 1
        current: Optional[Round] = None
        if self.calls is not None:
            current = self._begin(number, version, engines, believing)
            targets = current.targets
        else:
            targets = self._hear_targets(number)
        reached = frozenset(target.request.engine for target in targets)
        ranks = self._participants(reached)
        if self.rank in ranks:
            sent = stream(self._gatherer(reached), self.links, self.seats, targets, self.settings.timeout_s,
                          self.bases)
            self.store.set(_key(number, f"sent/{self.rank}"), sent.to_json())
        if current is not None:
            report = self._conclude(current, ranks, began)
            self.store.set(_key(number, "report"), report.to_json())
            return report
        report = PushReport.from_json(self._hear(_key(number, "report")))
        self.store.add(_key(number, "heard"), 1)
        return report

    # -- rank 0

    def _begin(self, number: int, version: Version, engines: Optional[list[int]], believing: bool) -> Round:
        """Have the engines begin, and tell the other ranks."""
        current = self.calls.believe(number, version, engines, self.plan) if believing else None
        if current is None:
            current = self.calls.begin(number, version, engines, self.plan, self._exclude)
        self.calls.start(current)
        self.store.set(_key(number, "targets"), json.dumps({
            "targets": [asdict(target) for target in current.targets],
            "not_sharded": sorted(self.plan.options.not_sharded)}))
        return current

    def _discard(self, part: str = "") -> None:
        """Remove the files of the disk transport, or a part of them."""
        if self.folder is not None:
            discard(self.folder / part)

    def _exclude(self, unfit: dict[str, str]) -> SyncPlan:
        """Plan anew, without sending these HF tensors as shards."""
        logger.warning("%d tensors travel whole, because engines cannot take them as shards: %s", len(unfit),
                       "; ".join(f"{name}: {why}" for name, why in sorted(unfit.items())))
        self._plan(self.plan.options.not_sharded | unfit.keys())
        return self.plan

    def _conclude(self, push: Round, ranks: frozenset[int], began: float) -> PushReport:
        """Wait for the senders and the engines, and judge."""
        self._sweep()  # while the engines' last words are on their way
        sent = [Sent.from_json(self._hear(_key(push.number, f"sent/{rank}"))) for rank in sorted(ranks)]
        self.calls.conclude(push, lambda engine: [part.errors[engine] for part in sent if engine in part.errors],
                            time.monotonic() + self.settings.timeout_s + MARGIN_S)
        self._discard(label_prefix(push.version, push.number))  # every engine has committed it or given up
        results = push.results.values()
        self.left[push.number] = [
            *(_key(push.number, name) for name in ("targets", "report", *(f"sent/{rank}" for rank in ranks))),
            *self.calls.keys(push, self.plan)]
        return PushReport(
            version=str(push.version), strategy=self.plan.strategy, seconds=time.monotonic() - began,
            gather_s=max((part.gather_s for part in sent), default=0.0),
            send_s=max((part.send_s for part in sent), default=0.0),
            load_s=max((result.apply_s for result in results), default=0.0),
            transfer_s=max((result.transfer_s for result in results), default=0.0),
            bytes=sum(part.bytes for part in sent), sent_fraction=_fraction(sent),
            errors=push.errors, absent=push.absent, again=tuple(push.again),
            verified=bool(results) and all(result.verified for result in results),
            unverified=tuple(sorted({name for result in results for name in result.unverified})))

    def _sweep(self) -> None:
        """Delete the store keys of past pushes that every rank has heard the end of."""
        for number, keys in [*self.left.items()]:
            if self.store.add(_key(number, "heard"), 0) == dist.get_world_size() - 1:
                for key in (*keys, _key(number, "heard")):
                    self.store.delete_key(key)
                del self.left[number]

    # -- every rank

    def _plan(self, not_sharded: frozenset[str] = frozenset()) -> None:
        """Make the plan, and what depends on it; the links of an earlier one are of no use any more."""
        self.links.close()
        self.plan = plan_of(self.experiment, self.trainer.spec, self.trainer.layout, self.trainer.te, not_sharded)
        self.seats = seats(self.plan, self.rank)
        self.gatherer: Optional[Gatherer] = None
        self.bases = Bases(self.settings.buffers, self.links.device) if self.settings.delta else None
        self.participants: dict[frozenset[int], frozenset[int]] = {}

    def _participants(self, engines: frozenset[int]) -> frozenset[int]:
        """The ranks that gather or send something for these engines."""
        if engines not in self.participants:
            self.participants[engines] = frozenset(
                rank for bucket in self.plan.outline if not engines.isdisjoint(bucket.engines)
                for one in bucket.slices for rank in one.ranks)
        return self.participants[engines]

    def _gatherer(self, engines: frozenset[int]) -> Gatherer:
        """Views into the parameters, made anew only when these have moved or the engines are others."""
        params = self.trainer.local_params()
        if self.gatherer is None or not self.gatherer.current(params, engines):
            self.gatherer = None  # its buffers go before the next one's come
            self.gatherer = Gatherer(self.plan, self.rank, params, engines, self.settings.buffers,
                                     lends=not receive_buffers(self.experiment))
        return self.gatherer

    def _hear_targets(self, number: int) -> list[Target]:
        """What rank 0 has to say at the beginning of a push: whom it is for, and by which plan."""
        order = json.loads(self._hear(_key(number, "targets")))
        not_sharded = frozenset(order["not_sharded"])
        if not_sharded != self.plan.options.not_sharded:
            self._plan(not_sharded)
        return [Target(SyncRequest.from_json(json.dumps(entry["request"])), entry["workers"])
                for entry in order["targets"]]

    def _hear(self, key: str) -> str:
        """The value another rank sets. TimeoutError when it does not by sync.timeout_s."""
        try:
            self.store.wait([key], timedelta(seconds=self.settings.timeout_s + 2 * MARGIN_S))
        except dist.DistStoreError as error:
            raise TimeoutError(f"rank {self.rank} waited in vain for {key!r}: another trainer rank is gone") from error
        return self.store.get(key).decode()

    def _open_store(self, host: Optional[str]) -> tuple[dist.TCPStore, str]:
        """The store where ranks and engines meet: served by rank 0, at its address alone."""
        place: list[Any] = [None]
        store = None
        if self.rank == 0:
            listener = socket.create_server((host or _own_address(), 0))
            place = [listener.getsockname()]
            store = dist.TCPStore(*place[0], is_master=True, wait_for_workers=False,
                                  master_listen_fd=listener.detach())
        dist.broadcast_object_list(place, src=0)
        return store or dist.TCPStore(*place[0], is_master=False), place[0][0]


def _key(push: int, name: str) -> str:
    """Store key of a push. "heard" counts the ranks, beside rank 0, that have its report."""
    return f"push/{push}/{name}"


def _fraction(sent: list[Sent]) -> float:
    """Bytes sent of those that a full push sends."""
    full = sum(part.full_bytes for part in sent)
    return sum(part.bytes for part in sent) / full if full else 1.0


def _own_address() -> str:
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        return "127.0.0.1"
    return address_towards(os.environ["MASTER_ADDR"])
