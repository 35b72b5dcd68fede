"""One worker's side of a sync: check, trace, receive, apply, checksum.

Knows no particular engine: it is given a model and the loader that belongs to it.
"""
from __future__ import annotations

import logging
import queue
import threading
import time
from typing import Any, Optional

import torch

from .checksum import checksum
from .links import LinkError, Meeting, Transport, finish_stream, open_store, own_stream
from .trace import Loader, Route, TraceError, trace, untouched
from .transports import TRANSPORTS, connect
from .wire import Bucket, Holding, Plan, SyncRequest, ready_key

logger = logging.getLogger(__name__)


class Refused(RuntimeError):
    """The request is not for this worker, or not for now; nothing has been changed."""


class Receiver:
    """Receives syncs into `model`. Made once in a worker's life.

    load: the engine's loader of HF tensors. worker: this worker's number, 0 … workers-1. `dirty` is True from the
    first received byte until all of a sync is in place.
    """

    def __init__(self, model: torch.nn.Module, load: Loader, run_id: str, engine: int, incarnation: int,
                 worker: int, workers: int):
        self.model, self.load = model, load
        self.run_id, self.engine, self.incarnation = run_id, engine, incarnation
        self.worker, self.workers = worker, workers
        self.device = next(model.parameters()).device
        self.dirty = True
        self.accepted: tuple[int, int] = (-1, -1)
        self.plan: Optional[Plan] = None
        self.routes: list[Route] = []
        self.ring: list[torch.Tensor] = []
        self.link: Optional[str] = None
        self.transports: dict[int, Transport] = {}
        self.store = None

    def prepare(self, request: SyncRequest) -> dict[str, Any]:
        """Take on the request's plan: trace it through the loader, writing nothing.

        Returns {"holdings": {HF name: [Holding]}, "opaque": {HF name: why its place is unknown}}, in wire form.
        Raises Refused or TraceError and keeps the old plan.
        """
        self._check(request)
        plan = Plan.from_wire(request.plan)
        if self.plan is None or plan.digest != self.plan.digest or request.buffers != len(self.ring):
            size = -(-plan.max_bytes // 16) * 16  # a multiple of every dtype's size
            ring = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(request.buffers)]
            routes = [trace(bucket, _slot(ring, bucket), self.model, self.load) for bucket in plan.buckets]
            if left_out := untouched(self.model, routes):
                raise TraceError(f"the engine's parameters {', '.join(left_out[:5])} (of {len(left_out)}) receive "
                                 f"nothing from the plan")
            self.plan, self.ring, self.routes = plan, ring, routes
            for route in routes:
                if route.reason:
                    logger.warning("bucket %d goes through the engine's loader: %s", route.bucket.index, route.reason)
        return {"holdings": self._holdings(with_checksums=False), "opaque": self._opaque()}

    def receive(self, request: SyncRequest) -> dict[str, Any]:
        """Receive all buckets and put them in place. `prepare` has taken on the plan.

        Returns {"receive_s", "apply_s"} and, with request.verify, {"holdings", "opaque", "expected": {HF name: the
        sender's checksum}}. Raises Refused with nothing changed, or another error with `dirty` left True.
        """
        self._check(request)
        if self.plan is None:
            raise Refused("no plan has been prepared")
        deadline = time.monotonic() + request.deadline_s
        try:
            self._connect(request, deadline)
            self.dirty, self.accepted = True, request.version
            reply: dict[str, Any] = self._transfer(deadline)
            if request.verify:
                reply["expected"] = self._expected(deadline)
                reply["holdings"], reply["opaque"] = self._holdings(with_checksums=True), self._opaque()
        except BaseException:
            self.close()
            raise
        self.dirty = False
        return reply

    def scramble(self, seed: int) -> None:
        """Overwrite every received element with noise, so that a test can see that a sync restores all of them."""
        generator = torch.Generator(device=self.device).manual_seed(seed)
        with torch.no_grad():
            for route in self.routes:
                for target in route.targets:
                    target.uniform_(-1, 1, generator=generator)

    def close(self) -> None:
        """Give up the communicators; the senders' side fails too."""
        for transport in self.transports.values():
            transport.close()
        self.transports, self.link, self.store = {}, None, None

    def _check(self, request: SyncRequest) -> None:
        mine = (self.run_id, self.engine, self.incarnation)
        if (request.run_id, request.engine, request.incarnation) != mine:
            raise Refused(f"the sync is for run {request.run_id!r}, engine {request.engine}, incarnation "
                          f"{request.incarnation}; this is run {mine[0]!r}, engine {mine[1]}, incarnation {mine[2]}")
        if request.version < self.accepted:
            raise Refused(f"version {_text(request.version)} is older than {_text(self.accepted)}, accepted before")
        if request.transport not in TRANSPORTS:
            raise Refused(f"transport {request.transport!r} is unknown; known are {', '.join(TRANSPORTS)}")

    def _connect(self, request: SyncRequest, deadline: float) -> None:
        """Tell the senders that we are ready, and build the link's communicators if we are to."""
        if not request.connect and request.link != self.link:
            raise LinkError(f"link {request.link} is gone; the next push builds another")
        if request.connect:
            self.close()
            self.store = open_store(request.store_host, request.store_port, deadline)
        self.store.set(ready_key(request, self.worker), "1")
        if request.connect:
            for stage in self.plan.stages:
                self.transports[stage] = connect(request.transport, Meeting(
                    self.store, request.store_host, request.link, str(stage), 1 + self.worker, 1 + self.workers,
                    self.device), deadline)
            self.link = request.link

    def _transfer(self, deadline: float) -> dict[str, float]:
        """All buckets: a thread receives bucket i+1 while bucket i is put in place."""
        free = threading.Semaphore(len(self.ring))
        arrived: queue.Queue[Bucket | Exception] = queue.Queue()
        given_up = threading.Event()
        seconds = {"receive_s": 0.0, "apply_s": 0.0}

        def pump() -> None:
            try:
                with own_stream(self.device):
                    for bucket in self.plan.buckets:
                        free.acquire()
                        if given_up.is_set():
                            return
                        began = time.monotonic()
                        flat = _slot(self.ring, bucket)
                        self.transports[bucket.stage].broadcast(flat, deadline).wait(deadline)
                        seconds["receive_s"] += time.monotonic() - began
                        arrived.put(bucket)
            except Exception as error:
                arrived.put(error)

        thread = threading.Thread(target=pump, name="mrl-receive", daemon=True)
        thread.start()
        try:
            for route in self.routes:
                received = arrived.get()  # the pump always puts something by the deadline
                if isinstance(received, Exception):
                    raise received
                began = time.monotonic()
                route.apply(_slot(self.ring, received), self.load)
                finish_stream(self.device)  # a buffer may be received into again only when it has been read
                seconds["apply_s"] += time.monotonic() - began
                free.release()
        except BaseException:  # the pump must neither wait for a buffer for ever nor fill one during a later sync
            given_up.set()
            free.release()
            self.close()
            raise
        finally:
            thread.join()
        return seconds

    def _expected(self, deadline: float) -> dict[str, int]:
        """The senders' checksums, their last message on each link."""
        expected: dict[str, int] = {}
        for stage in self.plan.stages:
            names = [item.name for bucket in self.plan.buckets if bucket.stage == stage for item in bucket.items]
            sums = torch.empty(len(names), dtype=torch.int64, device=self.device)
            self.transports[stage].broadcast(sums, deadline).wait(deadline)
            expected.update(zip(names, sums.tolist()))
        return expected

    def _holdings(self, with_checksums: bool) -> dict[str, list]:
        return {name: [Holding(lattice, self._sum(route, lattice, home) if with_checksums else None).to_wire()
                       for lattice, home in homes]
                for route in self.routes for name, homes in route.homes.items()}

    def _sum(self, route: Route, lattice, home: torch.Tensor) -> int:
        return checksum(home.to(route.bucket.torch_dtype), lattice)  # a wider home gives back exactly what was sent

    def _opaque(self) -> dict[str, str]:
        return {item.name: route.reason for route in self.routes if route.reason for item in route.bucket.items}


def _slot(ring: list[torch.Tensor], bucket: Bucket) -> torch.Tensor:
    """The fixed place of a bucket in the ring, as a flat tensor of its dtype."""
    return ring[bucket.index % len(ring)].view(bucket.torch_dtype)[:bucket.numel]


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}:{version[1]}"
