"""Rank 0's conversation with the engines in one push: who is up, who needs a new link, and what came of it."""
from __future__ import annotations

import logging
import time
import uuid
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Callable, Iterable, Optional

import torch.distributed as dist

from mrl.config.schema import Sync
from mrl.engine.api import EngineChanged, EngineLost, EngineStatus, SyncError, SyncResult, Version
from mrl.receiver.mrl_receiver.links import failed_key
from mrl.receiver.mrl_receiver.wire import SyncRequest, announced_key, ready_key, sums_key
from mrl.reshard.plan import SyncPlan
from mrl.stream.links import START_SHARE, Target

logger = logging.getLogger(__name__)

MARGIN_S = 30.0
"""How much longer than sync.timeout_s a rank waits for another's word before it gives the gang up."""


@dataclass
class _Known:
    """What rank 0 remembers of an engine: the link that works, the incarnation it belongs to, and its syncs; with the
    link, the number of the last push over it, which went well."""

    link: Optional[str] = None
    incarnation: int = 0
    syncs: int = 0
    held: Optional[int] = None


@dataclass
class Round:
    """What rank 0 knows of the push under way; `errors`, `absent` and `again` as in PushReport. believed: the engines
    have not been asked whether they are as they were."""

    number: int
    version: Version
    targets: list[Target] = field(default_factory=list)
    futures: dict[int, Future] = field(default_factory=dict)
    results: dict[int, SyncResult] = field(default_factory=dict)
    errors: dict[int, Optional[str]] = field(default_factory=dict)
    absent: dict[int, str] = field(default_factory=dict)
    again: list[int] = field(default_factory=list)
    believed: bool = False


class EngineCalls:
    """Rank 0's, one for the life of a WeightSync.

    engines: handles of the EngineServer actors. store: the weight store at `host`; `signals` is a connection of its own
    to it, for engines' failures come at any time, and a wait in one connection blocks every other use of that.
    """

    def __init__(self, engines: list, run_id: str, settings: Sync, transport: str, store: dist.TCPStore, host: str):
        self.engines, self.run_id, self.settings, self.transport = engines, run_id, settings, transport
        self.host, self.port = host, store.port
        self.signals = dist.TCPStore(host, store.port, is_master=False)
        self.known = [_Known() for _ in engines]
        self.first_syncs = 2 if settings.delta else 1  # are verified: the first whole one, and the first of changes
        self.name = uuid.uuid4().hex[:8]  # an engine must not take the links of a restarted gang for its old ones

    def believe(self, number: int, version: Version, engines: Optional[Iterable[int]], plan: SyncPlan
                ) -> Optional[Round]:
        """The round to begin without a question, if all these engines were left with a link that works.

        One that has changed since refuses, and is in `again` in the end.
        """
        wanted = self._wanted(engines)
        if self.settings.delta or any(self.known[index].link is None for index in wanted):
            return None  # what changes are applied to, an engine must say
        push = Round(number, version, believed=True)
        push.targets = [Target(self._request(push, index, after=self.known[index].held), plan.engine_layout.world)
                        for index in wanted]
        return push

    def begin(self, number: int, version: Version, engines: Optional[Iterable[int]], plan: SyncPlan,
              exclude: Callable[[dict[str, str]], SyncPlan]) -> Round:
        """Find the engines that can take part, and let those with a new link prepare for the plan.

        exclude: makes the plan anew, without sending these HF tensors as shards, for the reason given with each. It is
        called when an engine cannot take them so; then every engine gets a new link, because all have the same plan.
        """
        push = Round(number, version)
        statuses = self._up(push, self._wanted(engines), plan)
        deadline = time.monotonic() + START_SHARE * self.settings.timeout_s
        requests = self._requests(push, statuses)
        while unfit := self._prepare(push, requests, plan, deadline):
            plan = exclude(unfit)
            for known in self.known:
                known.link, known.syncs = None, 0
            requests = self._requests(push, {index: statuses[index] for index in requests})
        push.targets = [Target(request, plan.engine_layout.world) for request in requests.values()]
        return push

    def start(self, push: Round) -> None:
        """Announce the sync to the workers that wait for it, and call receive() on every target."""
        for target in push.targets:
            request = target.request
            if request.after is not None:
                self.signals.set(announced_key(request.link, request.after), request.to_json())
            future = push.futures[request.engine] = self.engines[request.engine].receive.remote(request).future()
            future.add_done_callback(lambda done, link=request.link: self._spread_failure(link, done))

    def conclude(self, push: Round, lost: Callable[[int], list[str]], deadline: float) -> None:
        """Wait for the engines, and judge. lost: why senders gave up the link to an engine."""
        for target in push.targets:
            index = target.request.engine
            try:
                push.results[index] = push.futures[index].result(max(0.0, deadline - time.monotonic()))
                push.errors[index] = None
                self.known[index].syncs += 1
                self.known[index].held = push.number
                if lost(index):  # a sender that has given up its end cannot send over this link again
                    self.known[index].link = None
            except Exception as error:
                if push.believed and _was_not_reached(error):
                    self.known[index].link = None
                    push.again.append(index)
                else:
                    self._failed(push, index, "; ".join(dict.fromkeys([words(error), *lost(index)])))

    def keys(self, push: Round, plan: SyncPlan) -> list[str]:
        """The store keys that links leave behind."""
        keys = []
        for target in push.targets:
            request = target.request
            keys += [failed_key(request.link), *(ready_key(request, worker) for worker in range(target.workers))]
            if request.after is not None:
                keys.append(announced_key(request.link, request.after))
            if request.verify:
                keys += [sums_key(request, sender) for sender in range(len(plan.senders(request.engine)))]
        return keys

    def _up(self, push: Round, indices: Iterable[int], plan: SyncPlan) -> dict[int, EngineStatus]:
        futures = {index: self.engines[index].status.remote().future() for index in indices}
        deadline = time.monotonic() + MARGIN_S
        found: dict[int, EngineStatus] = {}
        for index, future in futures.items():
            try:
                status: EngineStatus = future.result(max(0.0, deadline - time.monotonic()))
            except Exception as error:
                push.absent[index] = f"engine {index} does not answer: {words(error)}"
                continue
            if status.state in ("starting", "failed"):
                push.absent[index] = f"engine {index} is {status.state}" + (f": {status.error}" if status.error else "")
            elif status.world_size != plan.engine_layout.world:
                push.errors[index] = (f"engine {index} has {status.world_size} workers, the plan is for "
                                      f"{plan.engine_layout.world}: rollout.parallel must be what it was started with")
            else:
                found[index] = status
        return found

    def _wanted(self, engines: Optional[Iterable[int]]) -> list[int]:
        return [*(range(len(self.engines)) if engines is None else engines)]

    def _requests(self, push: Round, statuses: dict[int, EngineStatus]) -> dict[int, SyncRequest]:
        """The request for each engine, without the plan, over a new link where there is none that works."""
        requests = {}
        for index, status in statuses.items():
            known = self.known[index]
            if known.incarnation != status.incarnation:
                known.incarnation, known.syncs, known.link = status.incarnation, 0, None
            connecting = known.link is None
            if connecting:
                known.link, known.held = f"{self.name}/{push.number}/{index}", None
            base = known.held if status.state == "serving" else None  # one that slept has forgotten what it held
            after = None if self.settings.delta else known.held
            requests[index] = self._request(push, index, connect=connecting, base=base, after=after)
        return requests

    def _request(self, push: Round, index: int, connect: bool = False, base: Optional[int] = None,
                 after: Optional[int] = None) -> SyncRequest:
        known, every = self.known[index], self.settings.verify_every
        return SyncRequest(
            run_id=self.run_id, engine=index, incarnation=known.incarnation, version=tuple(push.version),
            push=push.number, link=known.link, connect=connect, store_host=self.host, store_port=self.port,
            plan={}, buffers=self.settings.buffers, transport=self.transport,
            verify=known.syncs < self.first_syncs or (every > 0 and known.syncs % every == 0),
            deadline_s=self.settings.timeout_s, delta=self.settings.delta, base=base, after=after)

    def _prepare(self, push: Round, requests: dict[int, SyncRequest], plan: SyncPlan, deadline: float
                 ) -> dict[str, str]:
        """Have the connecting engines take on the plan; those that refuse leave `requests`.

        The HF tensors that some engine cannot take as shards, with the reason.
        """
        left = max(0.0, deadline - time.monotonic())
        futures = {index: self.engines[index].prepare.remote(
            replace(request, plan=plan.to_wire(index), deadline_s=left)).future()
            for index, request in requests.items() if request.connect}
        unfit: dict[str, str] = {}
        for index, future in futures.items():
            try:
                unfit |= future.result(max(0.0, deadline + MARGIN_S - time.monotonic())).not_sharded
            except Exception as error:
                self._failed(push, index, words(error))
                del requests[index]
        return unfit

    def _failed(self, push: Round, index: int, why: str) -> None:
        push.errors[index] = why
        self.known[index].link = None
        logger.warning("push of version %s to engine %d failed: %s", push.version, index, why)

    def _spread_failure(self, link: str, future: Future) -> None:
        """Tell senders that still wait for an engine, before or during the transfer, that it will not come."""
        if future.cancelled() or future.exception() is not None:
            self.signals.set(failed_key(link), "1")


def _was_not_reached(error: Exception) -> bool:
    """Whether the engine a sync was meant for is not there any more, or its gate, so that it knows nothing of it."""
    cause = getattr(error, "cause", None) or error
    return isinstance(cause, EngineChanged) or not isinstance(cause, (SyncError, EngineLost, TimeoutError))


def words(error: Exception) -> str:
    """What went wrong, less the traceback of the actor's process that Ray puts into its errors."""
    error = getattr(error, "cause", None) or error
    return str(error) or type(error).__name__
