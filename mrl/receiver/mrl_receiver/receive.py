"""One worker's side of a sync: check, trace, prove, receive, apply, checksum.

Knows no particular engine: it is given a model, the loader that belongs to it, and what brings derived tensors up to
date.
"""
from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Callable, Collection, NamedTuple, Optional, Sequence

import torch
import torch.distributed as dist

from .announced import Announced
from .base import Base
from .checksum import add, checksums
from .in_place import MovingViews, read
from .links import Lent, LinkError, failed_key, finish_stream, open_store, wait_for_queued
from .proof import fingerprints, unfaithful
from .routes import Arrival, Routes, misfits
from .trace import Loader, Traced, TraceError, trace
from .transfer import Connections, Incoming
from .transports import LENDING, TRANSPORTS
from .wire import Bucket, Holding, Plan, Shape, SyncRequest, ready_key, sums_key

logger = logging.getLogger(__name__)

SUMS_POLL_S = 0.2
"""Between two questions to the store whether the senders' checksums will still come."""


class Refused(RuntimeError):
    """The request is not for this worker, or not for now; nothing has been changed."""


class _LentBucket(NamedTuple):
    """A bucket in its sender's parameters: what they said of it, and what was made of that."""

    description: bytes
    arrival: Arrival
    views: MovingViews


@dataclass
class _Prepared:
    """A plan that was taken on: what of it this worker receives, where, and how it is put in place. ring: memory of
    its own; bucket i lies in ring[i mod len(ring)]. Where buckets can be borrowed from their senders instead there is
    none, and no slots and arrivals; in_place: by position, what was made of those that lie in place. proven: its shards
    have been compared with the loader. base: what changes are applied to, if changes are to come."""

    plan: Plan
    buckets: tuple[Bucket, ...]
    buffers: int
    lent: bool
    ring: list[torch.Tensor]
    slots: list[torch.Tensor]
    arrivals: list[Arrival]
    routes: Routes
    proven: bool
    base: Optional[Base]
    in_place: dict[int, _LentBucket] = field(default_factory=dict)

    def arrival(self, position: int, lent: Lent) -> Arrival:
        """What is to be done with a bucket where its sender has it: made once for each place of a ring, and once for
        what lies in place. ValueError when that is not the bucket."""
        if lent.flat is None:
            known = self.in_place.get(position)
            if known is None or known.description != lent.description:
                arrival = self.routes.arrival_of(read(lent.description, self.buckets[position], lent.storages))
                known = self.in_place[position] = _LentBucket(
                    lent.description, arrival, MovingViews(arrival.sources, lent.storages))
            known.views.follow(lent.storages)
            return known.arrival
        key = position, lent.flat.storage_offset()
        if key not in lent.made:
            flat = lent.flat.view(self.buckets[position].torch_dtype)
            lent.made[key] = self.routes.arrival(position, flat)
        return lent.made[key]

    def leave(self) -> None:
        """Hold no memory of senders' parameters."""
        for known in self.in_place.values():
            known.views.leave()


class Receiver:
    """Receives syncs into `model`. Made once in a worker's life.

    load: the engine's loader of HF tensors. refresh: recomputes what the engine derives from parameters, after every
    sync; derived: the parameters that it makes, which come with no HF tensor. worker: this worker's number, 0 …
    workers-1. `dirty` is True from the first overwritten parameter until all of a sync is in place. `held` is the
    number of the push whose weights are in place, over the link that is open.
    """

    def __init__(self, model: torch.nn.Module, load: Loader, run_id: str, engine: int, incarnation: int,
                 worker: int, workers: int, refresh: Callable[[], None] = lambda: None,
                 derived: Collection[str] = ()):
        self.model, self.load, self.refresh, self.derived = model, load, refresh, frozenset(derived)
        self.run_id, self.engine, self.incarnation = run_id, engine, incarnation
        self.worker, self.workers = worker, workers
        self.device = next(model.parameters()).device
        self.dirty = True
        self.accepted: tuple[int, int] = (-1, -1)
        self.held: Optional[int] = None
        self.tensors: dict[str, tuple[Shape, torch.dtype]] = {}
        self.traced = Traced()  # of self.tensors
        self.prepared: Optional[_Prepared] = None
        self.prepared_link: Optional[str] = None
        self.link: Optional[str] = None
        self.connections: Optional[Connections] = None
        self.store: Optional[dist.Store] = None
        self.announced: Optional[Announced] = None

    def prepare(self, request: SyncRequest) -> dict[str, Any]:
        """Take on the request's plan: trace it through the loader, writing nothing.

        Returns {"holdings": {HF name: [Holding]}, "opaque": {HF name: why its place is unknown}, "not_sharded":
        {HF name: why it cannot come as shards}, "proven": whether `prove` has nothing to do}, in wire form. With
        anything in not_sharded, and when Refused or TraceError is raised, the old plan stays.
        """
        self._check(request)
        plan = Plan.from_wire(request.plan, self.worker)
        if plan.workers != self.workers:
            raise Refused(f"the plan is for {plan.workers} workers; this engine has {self.workers}")
        if plan.tensor_kinds != self.tensors:
            traced = trace(plan.tensor_kinds, self.model, self.load)
            left_out = [name for name in traced.untouched(self.model) if name not in self.derived]
            if left_out:
                raise TraceError(f"the engine's parameters {', '.join(left_out[:5])} (of {len(left_out)}) receive "
                                 f"nothing from the plan")
            self.tensors, self.traced = plan.tensor_kinds, traced
        wrong = misfits(plan, self.worker, self.traced)
        if not wrong:
            self._take_on(plan, request)
        return {"holdings": _holdings(self.traced), "opaque": self.traced.opaque, "not_sharded": wrong,
                "proven": not wrong and self.prepared.proven}

    def prove(self, request: SyncRequest) -> dict[str, Any]:
        """Compare the prepared plan's shards with the loader; see `proof`. `dirty` from then on.

        Returns {"not_sharded": {HF name: what shows that it cannot come as shards}}.
        """
        self._check(request)
        self._require_prepared(request)
        wrong: dict[str, str] = {}
        if not self.prepared.proven:
            self.dirty, self.held = True, None
            own = self.prepared
            own.routes.staging.clear()
            wrong = unfaithful(self.model, self.load, self.refresh, self.tensors, own.buckets, own.slots,
                               own.arrivals, own.routes, own.plan.direct)
            own.proven = not wrong
        return {"not_sharded": {name: f"worker {self.worker}: {why}" for name, why in wrong.items()}}

    def receive(self, request: SyncRequest) -> dict[str, Any]:
        """Receive all buckets and put them in place. `prepare` has taken on the plan for this link.

        Returns {"receive_s", "apply_s", "transfer_s"} and, with request.verify, {"holdings", "opaque"}, and on worker 0
        "expected": the senders' checksums, in the form of `sums_key`. Raises Refused with nothing changed, or another
        error with `dirty` left True.
        """
        self._check(request)
        self._require_prepared(request)
        if request.base is not None and request.base != self.held:
            raise Refused(f"changes since push {request.base} are of no use: push {self.held} is in place")
        deadline = time.monotonic() + request.deadline_s
        try:
            incoming = self._begun(request, deadline)
            self.dirty, self.held, self.accepted = True, None, request.version
            reply: dict[str, Any] = self._put_in_place(incoming, fill=request.base is None)
            if self.store.check([failed_key(request.link)]):
                raise LinkError(f"link {request.link}: a peer gave it up")
            if request.verify:
                own = self.prepared
                reply["holdings"] = _holdings(own.routes.traced, own.plan.tensor_kinds)
                reply["opaque"] = own.routes.traced.opaque
                if self.worker == 0:
                    reply["expected"] = self._expected(request, deadline)
        except BaseException:
            self.close()
            raise
        self.dirty, self.held = False, request.push
        if not request.delta:
            self.announced.listen(after=request.push)
        return reply

    def forget(self) -> None:
        """The weights are about to be lost: nothing can be applied to them, and only a whole sync brings others."""
        self.dirty, self.held = True, None

    def scramble(self, seed: int) -> None:
        """Overwrite every received element with noise, so that a test can see that a sync restores all of them."""
        generator = torch.Generator(device=self.device).manual_seed(seed)
        with torch.no_grad():
            for homes in self.prepared.routes.traced.homes.values():
                for home in homes:
                    home.target.copy_(torch.rand(home.target.shape, generator=generator, device=self.device) * 2 - 1)

    def fingerprint(self) -> dict[str, int]:
        """Checksums of everything in the model that may hold weights, by dotted name, for tests to compare."""
        return fingerprints(self.model)

    def close(self) -> None:
        """Give up the communicators; the senders' side fails too."""
        if self.prepared is not None:
            self.prepared.leave()
        if self.announced is not None:
            self.announced.close()
        if self.connections is not None:
            self.connections.close()
        self.connections, self.link, self.store, self.announced = None, None, None, None

    def _check(self, request: SyncRequest) -> None:
        mine = (self.run_id, self.engine, self.incarnation)
        if (request.run_id, request.engine, request.incarnation) != mine:
            raise Refused(f"the sync is for run {request.run_id!r}, engine {request.engine}, incarnation "
                          f"{request.incarnation}; this is run {mine[0]!r}, engine {mine[1]}, incarnation {mine[2]}")
        if request.version < self.accepted:
            raise Refused(f"version {_text(request.version)} is older than {_text(self.accepted)}, accepted before")
        if request.transport not in TRANSPORTS:
            raise Refused(f"transport {request.transport!r} is unknown; known are {', '.join(TRANSPORTS)}")

    def _require_prepared(self, request: SyncRequest) -> None:
        if self.prepared is None or self.prepared_link != request.link:
            raise Refused(f"no plan has been prepared for link {request.link}")

    def _take_on(self, plan: Plan, request: SyncRequest) -> None:
        """Make ring and routes, unless they are there from an earlier link; the old link is of no use any more."""
        if request.link != self.link:
            self.close()
        old, kind = self.prepared, (plan.digest, request.buffers, request.delta, _lends(plan, request))
        if old is None or kind != (old.plan.digest, old.buffers, old.base is not None, old.lent):
            self.prepared = old = None  # its ring goes before the new one comes
            self.prepared = self._make_room(plan, request)
            for name, reason in self.traced.opaque.items():
                logger.warning("%s goes through the engine's loader: %s", name, reason)
        self.prepared_link = request.link

    def _make_room(self, plan: Plan, request: SyncRequest) -> _Prepared:
        buckets, lent = plan.of_worker(self.worker), _lends(plan, request)
        routes = Routes(buckets, self.traced, self.load, in_parts=lent)
        ring: list[torch.Tensor] = []
        slots: list[torch.Tensor] = []
        if not lent:
            size = -(-max((bucket.nbytes for bucket in buckets), default=0) // 16) * 16  # fits every dtype
            ring = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(request.buffers)]
            slots = [ring[position % len(ring)][:bucket.nbytes].view(bucket.torch_dtype)
                     for position, bucket in enumerate(buckets)]
        arrivals = [routes.arrival(position, flat) for position, flat in enumerate(slots)]
        base = Base(buckets, slots, self.traced) if request.delta else None
        return _Prepared(plan, buckets, request.buffers, lent, ring, slots, arrivals, routes, not plan.direct, base)

    def _begun(self, request: SyncRequest, deadline: float) -> Incoming:
        """What receives the request's buckets: begun when it was announced, or now, over a new link if it asks for one.
        """
        if not request.connect and request.link != self.link:
            raise LinkError(f"link {request.link} is gone; the next push builds another")
        if request.after is not None:
            return self.announced.take(request, deadline)
        if request.connect:
            self._connect(request, deadline)
        else:
            self.store.set(ready_key(request, self.worker), "1")
        return self._receive(request)

    def _connect(self, request: SyncRequest, deadline: float) -> None:
        """Tell the senders that we are ready, and build the link's communicators."""
        self.close()
        self.store, listening = (open_store(request.store_host, request.store_port, deadline) for _ in range(2))
        self.store.set(ready_key(request, self.worker), "1")  # from now on the trainers may be gone, and their store
        self.connections = Connections(self.prepared.plan, self.worker, request, self.store, self.device, deadline)
        self.link = request.link
        self.announced = Announced(listening, self.store, request.link, self._receive_announced)
        self.announced.start()

    def _receive_announced(self, request: SyncRequest, store: dist.Store) -> Incoming:
        store.set(ready_key(request, self.worker), "1")
        return self._receive(request)

    def _receive(self, request: SyncRequest) -> Incoming:
        """Receive what the senders send; nothing of it is put in place yet."""
        own = self.prepared
        return Incoming(own.buckets, None if own.lent else own.slots, own.buffers, self.connections,
                        time.monotonic() + request.deadline_s)

    def _put_in_place(self, incoming: Incoming, fill: bool) -> dict[str, float]:
        """All buckets, and then what the engine derives from them.

        fill: else what is filled is there, and filling would spoil the base of later buckets.
        """
        own = self.prepared
        own.routes.staging.clear()

        def apply(position: int, lent: Optional[Lent]) -> Callable[[], None]:
            if own.base is not None:
                own.base.complete(position, self.connections.headers.pop(own.buckets[position].index))
            own.routes.apply(position, own.arrivals[position] if lent is None else own.arrival(position, lent), fill)
            return wait_for_queued(self.device)  # a slot may be received into again only when it has been read

        seconds = incoming.put_in_place(apply)
        if own.lent:
            own.leave()
            self.connections.let_go()
        began = time.monotonic()
        with torch.no_grad():
            self.refresh()
        finish_stream(self.device)
        ended = time.monotonic()
        return {**seconds, "apply_s": seconds["apply_s"] + ended - began, "transfer_s": ended - incoming.began}

    def _expected(self, request: SyncRequest, deadline: float) -> dict[str, Any]:
        """What all senders together have sent. LinkError when one of them does not say."""
        shared: dict[str, int] = {}
        direct: dict[str, dict[str, int]] = {}
        for sender in range(self.prepared.plan.senders):
            sums = json.loads(self._hear(sums_key(request, sender), failed_key(request.link), deadline))
            for into, given in [(shared, sums["shared"]),
                                *((direct.setdefault(worker, {}), one) for worker, one in sums["direct"].items())]:
                for name, value in given.items():
                    into[name] = add(into.get(name, 0), value)
        return {"shared": shared, "direct": direct}

    def _hear(self, key: str, failed: str, deadline: float) -> bytes:
        while True:
            try:
                self.store.wait([key], timedelta(seconds=SUMS_POLL_S))
                return self.store.get(key)
            except dist.DistStoreError as error:
                if time.monotonic() > deadline or self.store.check([failed]):
                    raise LinkError(f"a sender's checksums did not come ({key})") from error


def _holdings(traced: Traced, kinds: Optional[dict[str, tuple[Shape, torch.dtype]]] = None) -> dict[str, list]:
    """What a worker holds of every HF tensor, in wire form; given the tensors' kinds, with checksums."""
    homes = [(name, home) for name, its in traced.homes.items() for home in its]
    sums: Sequence[Optional[int]] = [None] * len(homes)
    if kinds is not None:  # a wider home gives back exactly what was sent
        sums = checksums((home.target.to(kinds[name][1]), home.lattice) for name, home in homes)
    found: dict[str, list] = {name: [] for name in traced.homes}
    for (name, home), value in zip(homes, sums, strict=True):
        found[name].append(Holding(home.lattice, value).to_wire())
    return found


def _lends(plan: Plan, request: SyncRequest) -> bool:
    """Whether buckets can be put in place from where their senders have them: none is cut over several workers, proven
    with noise, or completed before it is copied. The senders know it from the experiment (`receive_buffers`)."""
    return request.transport in LENDING and not plan.gathers and not plan.direct and not request.delta


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}:{version[1]}"
