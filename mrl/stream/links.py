"""A sender's end of the links: its communicators to each engine, built, dropped and rebuilt engine by engine."""
from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Iterable, Mapping, NamedTuple, Optional

import torch
import torch.distributed as dist

from mrl.receiver.mrl_receiver.in_place import InPlace
from mrl.receiver.mrl_receiver.links import (SENDER_RANK, Label, Lending, LinkError, Meeting, Pending, Transport,
                                             failed_key, open_store, own_stream)
from mrl.receiver.mrl_receiver.transports import connect
from mrl.receiver.mrl_receiver.wire import BROADCAST, PEERS, SyncRequest, ready_key
from mrl.reshard.plan import SyncPlan

logger = logging.getLogger(__name__)

READY_POLL_S = 0.005
"""Longest pause between two questions whether an engine is ready; shorter ones come first, as it usually is at once."""
READY_POLL_SHARE = 0.1
"""Of the time waited so far, a pause."""
START_SHARE = 0.5
"""Share of a sync's time after which an engine that has not joined is left out, so that the others can finish."""

Workers = Optional[tuple[int, ...]]
"""Whom a message is for: some workers of an engine, point-to-point; None: all of them, by a broadcast."""


@dataclass(frozen=True)
class Target:
    """One engine as a target of one push: the request it gets, and the number of its workers."""

    request: SyncRequest
    workers: int


@dataclass(frozen=True)
class Seat:
    """A sender's place on the link of one engine: what it needs communicators for.

    senders: all global ranks that send to this engine, in the order that numbers them on the link.
    """

    senders: tuple[int, ...]
    p2p: bool
    broadcasts: bool


class Transfer(NamedTuple):
    """A message on its way to one engine."""

    engine: int
    pending: Pending


@dataclass
class Link:
    """The communicators of one sender to one engine: with all senders and workers, and for its own broadcasts."""

    senders: int
    p2p: Optional[Transport | Lending] = None
    broadcasts: Optional[Transport] = None

    def start(self, content: torch.Tensor | InPlace, workers: Workers, deadline: float, label: Label) -> list[Pending]:
        """Begin to send a buffer, or to lend what lies in place. LinkError."""
        if isinstance(content, InPlace):
            return [self.p2p.lend(content, self.senders + worker, deadline) for worker in workers]
        if workers is None:
            return [self.broadcasts.broadcast(content, deadline, label)]
        return [self.p2p.send(content, self.senders + worker, deadline, label) for worker in workers]

    def let_go(self) -> None:
        if self.p2p is not None:
            self.p2p.let_go()

    def close(self) -> None:
        for transport in (self.p2p, self.broadcasts):
            if transport is not None:
                transport.close()


def seats(plan: SyncPlan, rank: int) -> dict[int, Seat]:
    """The places of `rank` on the links of the engines that it sends to, by engine."""
    modes: dict[int, set[str]] = {}
    mine: dict[int, set[str]] = {}
    for bucket in plan.outline:
        for engine in bucket.engines:
            modes.setdefault(engine, set()).add(bucket.mode)
            if any(one.sender == rank for one in bucket.slices):
                mine.setdefault(engine, set()).add(bucket.mode)
    return {engine: Seat(plan.senders(engine), modes[engine] != {"broadcast"}, "broadcast" in own)
            for engine, own in mine.items()}


@dataclass
class Links:
    """The links of one sender. `store` is this thread's connection to the weight store; what is sent lies on `device`.

    errors: by engine, why its link was lost in the push that `begin` began. folder: where the disk transport writes;
    None with the others. stream: what sending threads queue their device work on, one at a time; always the same, as
    memory that was used on one stream is not soon given to another.
    """

    rank: int
    store: dist.Store
    device: torch.device
    open: dict[int, Link] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    folder: Optional[Path] = None

    def __post_init__(self):
        self.stream = own_stream(self.device)

    def begin(self, targets: list[Target], seats: Mapping[int, Seat], timeout_s: float) -> None:
        """Wait until every engine that has a seat for us stands ready, and build the links that are new.

        Engines that fail are in `errors`.
        """
        self.errors = {}
        deadline = time.monotonic() + START_SHARE * timeout_s
        waiting = {target.request.engine: target for target in targets if target.request.engine in seats}
        for engine in [*self.open]:
            if engine in waiting and waiting[engine].request.connect:
                self._close(engine)
        ready: list[Target] = []
        began = time.monotonic()
        while waiting:
            for engine, target in [*waiting.items()]:
                if self.store.check([ready_key(target.request, worker) for worker in range(target.workers)]):
                    ready.append(waiting.pop(engine))
                elif self.store.check([failed_key(target.request.link)]):
                    del waiting[engine]
                    self.drop(engine, "the engine refused the sync")
                elif time.monotonic() > deadline:
                    del waiting[engine]
                    self.drop(engine, f"the engine was not ready within {START_SHARE * timeout_s:g} s")
            if waiting:
                time.sleep(min(READY_POLL_S, READY_POLL_SHARE * (time.monotonic() - began)))
        new = [target for target in ready if target.request.connect]
        if new:
            with ThreadPoolExecutor(len(new)) as pool:  # one engine that dies now must not keep the others waiting
                list(pool.map(lambda target: self._build(target, seats[target.request.engine], deadline), new))

    def start(self, engines: Iterable[int], content: torch.Tensor | InPlace, workers: Workers, deadline: float,
              label: Label) -> list[Transfer]:
        """Begin to send over the open links among `engines`, to the same `workers` of each."""
        transfers: list[Transfer] = []
        for engine in engines:
            if engine in self.open:
                try:
                    transfers += [Transfer(engine, pending)
                                  for pending in self.open[engine].start(content, workers, deadline, label)]
                except LinkError as error:
                    self.drop(engine, str(error))
        return transfers

    def finish(self, transfers: list[Transfer], deadline: float) -> None:
        """Return when every engine has finished with its transfers or was dropped: the buffer may be written again."""
        for engine, pending in transfers:
            if engine in self.open:
                try:
                    pending.wait(deadline)
                except LinkError as error:
                    self.drop(engine, str(error))

    def let_go(self) -> None:
        """A sync is over: forget what was lent for it alone."""
        for link in self.open.values():
            link.let_go()

    def drop(self, engine: int, error: str) -> None:
        """Give up one engine's link; the next push builds another."""
        logger.warning("rank %d: link to engine %d dropped: %s", self.rank, engine, error)
        self.errors.setdefault(engine, error)
        self._close(engine)

    def close(self) -> None:
        for engine in [*self.open]:
            self._close(engine)

    def _build(self, target: Target, seat: Seat, deadline: float) -> None:
        """Both ends build in the same order: communicators of senders that broadcast, then the one of all."""
        request, link = target.request, Link(len(seat.senders))
        position = seat.senders.index(self.rank)

        def meet(part: str, rank: int, senders: int) -> Transport:
            return connect(request.transport, Meeting(store, request.store_host, request.link, part, rank,
                                                      senders + target.workers, self.device, self.folder), deadline)

        try:
            store = open_store(request.store_host, request.store_port, deadline)
            if seat.broadcasts:
                link.broadcasts = meet(BROADCAST.format(position), SENDER_RANK, 1)
            if seat.p2p:
                link.p2p = meet(PEERS, position, link.senders)
            self.open[request.engine] = link
        except LinkError as error:
            link.close()
            self.drop(request.engine, str(error))

    def _close(self, engine: int) -> None:
        if link := self.open.pop(engine, None):
            link.close()
