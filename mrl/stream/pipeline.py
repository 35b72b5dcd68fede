"""One push on one rank: gather the next slice while earlier ones are on their way to the engines."""
from __future__ import annotations

import json
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Mapping, Optional

from mrl.receiver.mrl_receiver.checksum import add, checksums
from mrl.receiver.mrl_receiver.links import Label, finish_stream
from mrl.receiver.mrl_receiver.wire import sums_key
from mrl.stream.delta import Bases
from mrl.stream.gather import Gatherer, Share
from mrl.stream.links import START_SHARE, Links, Seat, Target, Transfer
from mrl.stream.report import Sent

STALL_SHARE = 0.25
"""Share of a sync's time that an engine may take for one slice. What is left then is for the others."""


def stream(gatherer: Gatherer, links: Links, seats: Mapping[int, Seat], targets: list[Target], timeout_s: float,
           bases: Optional[Bases] = None) -> Sent:
    """Gather this rank's share of every slice, and send the slices that end here to the targets they are for.

    bases: what was sent before, for pushes that send what has changed.
    Collective over all ranks with a share in the plan for these targets. Never fails because of an engine: such an
    engine is in `Sent.errors`, and all slices are gathered regardless, so that no rank waits for another.
    """
    sent = Sent()
    sender = _SenderThread(gatherer, links, seats, targets, timeout_s, bases, sent) if gatherer.sends else None
    if sender is not None:
        sender.start()
    for share in gatherer.shares:
        if share.content is not None:
            sender.free.acquire()
        began = time.monotonic()
        gatherer.fill(share)
        sent.gather_s += time.monotonic() - began
        if share.content is not None:
            sender.filled.release()
    if sender is not None:
        sender.join()
        if sender.crash is not None:
            raise sender.crash
        sent.errors = dict(links.errors)
    return sent


def label_prefix(version: tuple[int, int], push: int) -> str:
    """Begins the labels of all that is sent in one push; for the disk transport, a folder."""
    attempt, step = version
    return f"{attempt}/{step}/{push}"


class _SenderThread(threading.Thread):
    """Sends the filled slices in order. `free` counts how many more may be filled: one for each, up to the number of
    buffers, that every link has finished with."""

    def __init__(self, gatherer: Gatherer, links: Links, seats: Mapping[int, Seat], targets: list[Target],
                 timeout_s: float, bases: Optional[Bases], sent: Sent):
        super().__init__(name="mrl-send", daemon=True)
        self.shares, self.slots, self.lends = gatherer.sends, gatherer.buffers, gatherer.lends
        self.device = links.device
        self.links, self.seats, self.targets, self.timeout_s, self.sent = links, seats, targets, timeout_s, sent
        self.bases, self.push = bases, targets[0].request.push
        self.engines = {target.request.engine: target for target in targets}
        self.prefix = label_prefix(targets[0].request.version, self.push)
        self.free, self.filled = threading.Semaphore(self.slots), threading.Semaphore(0)
        self.sums: dict[int, Sums] = {}
        self.crash: Optional[BaseException] = None

    def run(self) -> None:
        try:
            with self.links.stream:
                try:
                    self._send_all()
                finally:
                    if self.lends:
                        self.links.let_go()
                finish_stream(self.device)  # the buffers will be used on other streams
        except BaseException as error:  # handed to the main thread, which must not hang in `free` meanwhile
            self.crash = error
            for _ in self.shares:
                self.free.release()

    def _send_all(self) -> None:
        self.began = time.monotonic()
        self.links.begin(self.targets, self.seats, self.timeout_s)
        under_way: deque[list[Transfer]] = deque()
        engines: tuple[int, ...] = ()
        for number, share in enumerate(self.shares):
            self.filled.acquire()
            began = time.monotonic()
            # On one link transfers queue up. Over several they would share this NIC, and a worker, which receives one
            # bucket at a time, would take each at a part of the speed while other senders had nothing to do.
            while under_way and share.engines != engines:
                self._finish(under_way.popleft())
            engines = share.engines
            under_way.append(self._start(number, share))
            if len(under_way) == self.slots:  # with fewer, the gather still has a slot to fill
                self._finish(under_way.popleft())
            self.sent.send_s += time.monotonic() - began
        began = time.monotonic()
        while under_way:
            self._finish(under_way.popleft())
        self._leave_sums()
        self.sent.send_s += time.monotonic() - began

    def _patience(self) -> float:
        """Until when an engine may take what it is sent now.

        Another sender may still wait for an engine that has not joined, and keep the one that we send to waiting.
        """
        joined = self.began + START_SHARE * self.timeout_s
        return min(self.began + self.timeout_s, max(time.monotonic(), joined) + STALL_SHARE * self.timeout_s)

    def _start(self, number: int, share: Share) -> list[Transfer]:
        engines = [engine for engine in share.engines if engine in self.engines]
        label = Label(f"{self.prefix}/{self.links.rank}/{number}", share.parts)
        verifying = [engine for engine in engines if self.engines[engine].request.verify]
        if self.bases is not None:
            if verifying:
                self._sum(share, verifying)  # a delta takes the slice's place
            return self._start_message(number, share, engines, label)
        transfers = self.links.start(engines, share.content, share.workers, self._patience(), label)
        self._count(transfers, share.content.nbytes, share)
        if verifying:
            self._sum(share, verifying)  # while the bytes are under way
        return transfers

    def _start_message(self, number: int, share: Share, engines: list[int], label: Label) -> list[Transfer]:
        held = [self.engines[engine].request.base for engine in engines]
        header, payload = self.bases.message(number, share, self.push, held)
        transfers = self.links.start(engines, header, share.workers, self._patience(), label)
        self._count(transfers, header.nbytes + payload.nbytes, share)
        if payload.numel():
            transfers += self.links.start(engines, payload, share.workers, self._patience(), label)
        return transfers

    def _count(self, transfers: list[Transfer], nbytes: int, share: Share) -> None:
        self.sent.bytes += len(transfers) * nbytes
        self.sent.full_bytes += len(transfers) * share.content.nbytes

    def _sum(self, share: Share, engines: list[int]) -> None:
        sums = checksums((values, part.lattice) for part, values in share.values)
        for engine in engines:
            self.sums.setdefault(engine, Sums()).add(share, sums)

    def _finish(self, transfers: list[Transfer]) -> None:
        self.links.finish(transfers, self._patience())
        self.free.release()

    def _leave_sums(self) -> None:
        """The checksums of all that was sent, in the store, for the engines that verify."""
        for engine, sums in self.sums.items():
            position = self.seats[engine].senders.index(self.links.rank)
            self.links.store.set(sums_key(self.engines[engine].request, position), json.dumps(asdict(sums)))


@dataclass
class Sums:
    """What one sender leaves for one engine: by HF tensor, the checksum of all parts that it sent to the engine, or to
    one of its workers."""

    shared: dict[str, int] = field(default_factory=dict)
    direct: dict[int, dict[str, int]] = field(default_factory=dict)

    def add(self, share: Share, sums: list[int]) -> None:
        """`sums` of the share's parts, in order."""
        total = self.direct.setdefault(*share.workers, {}) if share.direct else self.shared
        for part, value in zip(share.parts, sums, strict=True):
            total[part.name] = add(total.get(part.name, 0), value)
