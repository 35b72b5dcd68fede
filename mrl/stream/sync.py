"""WeightSync: pushes of the trainer's weights to the engines, as every trainer rank sees them."""
from __future__ import annotations

import json
import logging
import os
import socket
import time
import uuid
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any, Optional

import torch
import torch.distributed as dist

from mrl.config.schema import Experiment
from mrl.engine.api import EngineStatus, SyncResult, Version
from mrl.receiver.mrl_receiver.links import address_towards, failed_key
from mrl.receiver.mrl_receiver.wire import SyncRequest, ready_key
from mrl.reshard.layout import Coord
from mrl.reshard.plan import plan_sync
from mrl.stream.gather import StageBuckets
from mrl.stream.links import Links, Target
from mrl.stream.pipeline import Sent, stream

logger = logging.getLogger(__name__)

MARGIN_S = 30.0
"""How much longer than sync.timeout_s a rank waits for another's word before it gives the gang up."""
MIB = 1 << 20


@dataclass(frozen=True)
class PushReport:
    """How one push went. Times in seconds: whole, slowest gathering rank, slowest sender, slowest engine worker's
    copying into its parameters; `bytes` were sent to all engines together.

    errors: by engine that took part, None when it now serves the version, else what failed. absent: by engine that
    could not take part, because it is starting, has failed or does not answer, why. verified: every engine that
    succeeded in this push had its checksums compared. unverified: HF tensors that could not be, because the engine's
    loader transforms them.
    """

    version: str
    seconds: float
    gather_s: float
    send_s: float
    load_s: float
    bytes: int
    errors: dict[int, Optional[str]]
    absent: dict[int, str]
    verified: bool
    unverified: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every engine asked now serves the version."""
        return not self.absent and not any(self.errors.values())

    @classmethod
    def from_json(cls, text: str) -> "PushReport":
        fields = json.loads(text)
        by_engine = {name: {int(engine): text for engine, text in fields[name].items()}
                     for name in ("errors", "absent")}
        return cls(**{**fields, **by_engine, "unverified": tuple(fields["unverified"])})


@dataclass
class _Known:
    """What rank 0 remembers of an engine: the link that works, the incarnation it belongs to, and its syncs."""

    link: Optional[str] = None
    incarnation: int = 0
    syncs: int = 0


@dataclass
class _Calls:
    """Rank 0's side of a push: the engines' answers to come, and what was clear at once."""

    targets: list[Target] = field(default_factory=list)
    futures: dict[int, Future] = field(default_factory=dict)
    absent: dict[int, str] = field(default_factory=dict)


class WeightSync:
    """Built on every trainer rank, together, after init_process_group.

    trainer: gives `spec`, `layout`, `coord`, `te` and `local_params()`. engines: handles of the EngineServer actors on
    rank 0, None elsewhere. host: the address of this machine under which engines reach rank 0; by default 127.0.0.1
    when all trainer ranks are on one machine, else this machine's address.
    """

    def __init__(self, experiment: Experiment, trainer: Any, engines: Optional[list], run_id: str,
                 host: Optional[str] = None):
        self.settings, self.trainer, self.run_id = experiment.sync, trainer, run_id
        self.rank, self.engines = dist.get_rank(), engines
        self.plan = plan_sync(trainer.spec, trainer.layout, int(experiment.sync.bucket_mb * MIB),
                              experiment.model.dtype, trainer.te)
        self.coord: Coord = trainer.coord
        self.buckets = [bucket for bucket in self.plan.buckets if bucket.stage == self.coord.pp]
        self.group = self._stage_group()
        self.store, self.store_host = self._open_store(host)
        # A wait in one connection to the store blocks every other use of it, and engines' failures come at any time.
        self.signals = dist.TCPStore(self.store_host, self.store.port, is_master=False) if self.rank == 0 else None
        device = next(iter(trainer.local_params().values())).device
        self.transport = _transport(experiment, device)
        self.links: Optional[Links] = None
        if self.rank == trainer.layout.sender(self.coord.pp):
            self.links = Links(self.coord.pp, self.store, device)
        self.stage: Optional[StageBuckets] = None
        self.known = [_Known() for _ in engines or []]
        self.name = uuid.uuid4().hex[:8]  # an engine must not take the links of a restarted gang for its old ones
        self.pushes = 0
        self.left: dict[int, list[str]] = {}  # rank 0: by push, the store keys it has left behind

    def push(self, version: Version, engines: Optional[list[int]] = None) -> PushReport:
        """Bring this rank's weights, as `version`, into all engines (or those named); the same report on every rank.

        Collective over the trainer ranks. An engine that fails is in the report's errors, and one that is not up in
        its absent; it does not disturb the others, and a later push may succeed. Raises when a trainer rank is gone.
        """
        began, number = time.monotonic(), self.pushes
        self.pushes += 1
        calls = None
        if self.rank == 0:
            calls = self._call_engines(number, version, engines)
            targets = calls.targets
            self.store.set(f"push/{number}/targets", json.dumps([asdict(target) for target in targets]))
        else:
            targets = [Target(SyncRequest(**{**entry["request"], "version": tuple(entry["request"]["version"])}),
                              entry["workers"]) for entry in self._hear(f"push/{number}/targets")]
        if self.coord.dp == 0 and self.buckets and targets:
            sent = stream(self._stage_buckets(), self.links, targets, self.settings.timeout_s)
            self.store.set(f"push/{number}/sent/{self.rank}", json.dumps(asdict(sent)))
        if self.rank == 0:
            report = self._conclude(number, version, calls, began)
            self.store.set(f"push/{number}/report", json.dumps(asdict(report)))
            return report
        report = PushReport.from_json(json.dumps(self._hear(f"push/{number}/report")))
        self.store.add(_heard_key(number), 1)
        return report

    def close(self) -> None:
        """Give up this rank's links; the engines go on serving what they have. The last call, in any state, even twice.

        Not collective. Rank 0 must outlive the others' last push all the same, because it serves the store.
        """
        if self.links is not None:
            self.links.close()

    # -- rank 0

    def _call_engines(self, number: int, version: Version, engines: Optional[list[int]]) -> _Calls:
        """Ask the chosen engines for their state, and start receive() on each that can take part."""
        calls = _Calls()
        self._sweep()
        indices = range(len(self.engines)) if engines is None else engines
        statuses = {index: self.engines[index].status.remote().future() for index in indices}
        deadline = time.monotonic() + MARGIN_S
        for index, future in statuses.items():
            try:
                status: EngineStatus = future.result(max(0.0, deadline - time.monotonic()))
            except Exception as error:
                calls.absent[index] = f"engine {index} does not answer: {_words(error)}"
                continue
            if status.state in ("starting", "failed"):
                why = f": {status.error}" if status.error else ""
                calls.absent[index] = f"engine {index} is {status.state}{why}"
                continue
            request = self._request(number, version, status)
            calls.targets.append(Target(request, status.world_size))
            full = replace(request, plan=self.plan.to_wire()) if request.connect else request
            calls.futures[index] = self.engines[index].receive.remote(full).future()
            calls.futures[index].add_done_callback(
                lambda done, link=request.link: self._spread_failure(link, done))
        return calls

    def _request(self, number: int, version: Version, status: EngineStatus) -> SyncRequest:
        """The request for one engine, without the plan, which the senders have."""
        known = self.known[status.index]
        connecting = known.link is None or known.incarnation != status.incarnation
        if known.incarnation != status.incarnation:
            known.incarnation, known.syncs = status.incarnation, 0
        if connecting:
            known.link = f"{self.name}/{number}/{status.index}"
        every = self.settings.verify_every
        verify = known.syncs == 0 or (every > 0 and known.syncs % every == 0)
        return SyncRequest(
            run_id=self.run_id, engine=status.index, incarnation=status.incarnation, version=tuple(version),
            push=number, link=known.link, connect=connecting, store_host=self.store_host, store_port=self.store.port,
            plan={}, buffers=self.settings.buffers, transport=self.transport, verify=verify,
            deadline_s=self.settings.timeout_s)

    def _spread_failure(self, link: str, future: Future) -> None:
        """Tell senders that still wait for an engine, before or during the transfer, that it will not come."""
        if future.cancelled() or future.exception() is not None:
            self.signals.set(failed_key(link), "1")

    def _conclude(self, number: int, version: Version, calls: _Calls, began: float) -> PushReport:
        """Wait for the senders and the engines, and judge."""
        ranks = [self.trainer.layout.rank(Coord(tp=tp, pp=stage)) for stage in {b.stage for b in self.plan.buckets}
                 for tp in range(self.trainer.layout.tp)] if calls.targets else []
        sent = [Sent(**self._hear(f"push/{number}/sent/{rank}")) for rank in ranks]
        results: dict[int, SyncResult] = {}
        errors: dict[int, Optional[str]] = {}
        deadline = began + self.settings.timeout_s + MARGIN_S
        for index, future in calls.futures.items():
            try:
                results[index] = future.result(max(0.0, deadline - time.monotonic()))
                errors[index] = None
                self.known[index].syncs += 1
            except Exception as error:
                lost = [part.errors[str(index)] for part in sent if str(index) in part.errors]
                errors[index] = "; ".join([_words(error), *lost])
                self.known[index].link = None
                logger.warning("push of version %s to engine %d failed: %s", version, index, errors[index])
        self.left[number] = [
            f"push/{number}/targets", f"push/{number}/report", *(f"push/{number}/sent/{rank}" for rank in ranks),
            *(failed_key(target.request.link) for target in calls.targets),
            *(ready_key(target.request, worker) for target in calls.targets for worker in range(target.workers))]
        return PushReport(
            version=str(version), seconds=time.monotonic() - began,
            gather_s=max((part.gather_s for part in sent), default=0.0),
            send_s=max((part.send_s for part in sent), default=0.0),
            load_s=max((result.apply_s for result in results.values()), default=0.0),
            bytes=self.plan.total_bytes * len(results), errors=errors, absent=calls.absent,
            verified=bool(results) and all(result.verified for result in results.values()),
            unverified=tuple(sorted({name for result in results.values() for name in result.unverified})))

    def _sweep(self) -> None:
        """Delete the store keys of past pushes that every rank has heard the end of."""
        for number, keys in [*self.left.items()]:
            if self.store.add(_heard_key(number), 0) == dist.get_world_size() - 1:
                for key in (*keys, _heard_key(number)):
                    self.store.delete_key(key)
                del self.left[number]

    # -- every rank

    def _stage_buckets(self) -> StageBuckets:
        """Views into the parameters, made anew only when these have moved."""
        params = self.trainer.local_params()
        if self.stage is None or not self.stage.current(params):
            self.stage = StageBuckets(self.buckets, params, self.group, self.links is not None, self.settings.buffers)
        return self.stage

    def _hear(self, key: str) -> Any:
        """The JSON value another rank sets. TimeoutError when it does not by sync.timeout_s."""
        try:
            self.store.wait([key], timedelta(seconds=self.settings.timeout_s + 2 * MARGIN_S))
        except dist.DistStoreError as error:
            raise TimeoutError(f"rank {self.rank} waited in vain for {key!r}: another trainer rank is gone") from error
        return json.loads(self.store.get(key))

    def _stage_group(self) -> Optional[dist.ProcessGroup]:
        """The tensor-parallel ranks of this rank's stage, in the first replica; every rank makes every group."""
        layout, mine = self.trainer.layout, None
        if layout.tp > 1:
            for stage in range(layout.pp):
                ranks = [layout.rank(Coord(tp=tp, pp=stage)) for tp in range(layout.tp)]
                group = dist.new_group(ranks)
                mine = group if self.rank in ranks else mine
        return mine

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


def _heard_key(push: int) -> str:
    """Store key that counts the ranks that have the report of a push, beside rank 0."""
    return f"push/{push}/heard"


def _transport(experiment: Experiment, device: torch.device) -> str:
    """sync.transport, with `auto` decided: NCCL between GPUs, but it refuses two ranks on the same one."""
    if experiment.sync.transport != "auto":
        return experiment.sync.transport
    return "nccl" if device.type == "cuda" and experiment.loop.mode == "one_step_overlap" else "gloo"


def _words(error: Exception) -> str:
    """What went wrong, less the traceback of the actor's process that Ray puts into its errors."""
    error = getattr(error, "cause", None) or error
    return str(error) or type(error).__name__


def _own_address() -> str:
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        return "127.0.0.1"
    return address_towards(os.environ["MASTER_ADDR"])
