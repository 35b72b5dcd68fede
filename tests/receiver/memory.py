"""A transport between threads that is as unkind as the contract allows, for tests of what may be done with a buffer."""
from __future__ import annotations

import threading
import time
from collections import Counter

import torch

from mrl.receiver.mrl_receiver.links import LinkError, Meeting, PendingAll


class Hub:
    """Where the ranks of all communicators meet: `TRANSPORTS[name] = hub.connect`.

    A buffer is filled with garbage as soon as it is given to be received into, and bytes are read from the sender's
    buffer only when the receiver wants them. A buffer that was sent is garbage once all have its bytes.
    """

    def __init__(self):
        self.lock = threading.Lock()
        self.boxes: dict[tuple, Box] = {}
        self.under_way: Counter[int] = Counter()  # transfers that still have to read a buffer, by address

    def letters(self, name: str, sender: int, receiver: int) -> Box:
        """What is on its way between two ranks. Both may ask first, so that only one of them may make it."""
        with self.lock:
            return self.boxes.setdefault((name, sender, receiver), Box())

    def reads(self, flat: torch.Tensor, change: int) -> int:
        """Count transfers that have to read a buffer; how many there are now."""
        with self.lock:
            self.under_way[flat.data_ptr()] += change
            return self.under_way[flat.data_ptr()]

    def connect(self, meeting: Meeting, deadline: float) -> MemoryTransport:
        return MemoryTransport(self, meeting)


class Box:
    """Letters from one rank to another. The n-th that is sent is for the n-th that was asked for."""

    def __init__(self):
        self.letters: list[_Sent] = []
        self.asked, self.closed = 0, False
        self.changed = threading.Condition()

    def put(self, letter: _Sent) -> None:
        with self.changed:
            self.letters.append(letter)
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def ask(self) -> int:
        with self.changed:
            self.asked += 1
            return self.asked - 1

    def get(self, number: int, deadline: float) -> _Sent:
        with self.changed:
            self.changed.wait_for(lambda: self.closed or number < len(self.letters), deadline - time.monotonic())
            if number < len(self.letters):
                return self.letters[number]
            raise LinkError("a peer gave it up" if self.closed else "timed out")


def spoil(flat: torch.Tensor) -> None:
    """Bytes that are a NaN in every float dtype."""
    flat.view(torch.uint8).fill_(0xFF)


class _Sent:
    def __init__(self, hub: Hub, flat: torch.Tensor):
        self.hub, self.flat, self.taken = hub, flat, threading.Event()
        hub.reads(flat, 1)

    def wait(self, deadline: float) -> None:
        if not self.taken.wait(max(0.0, deadline - time.monotonic())):
            raise LinkError("timed out")
        if not self.hub.reads(self.flat, -1):
            spoil(self.flat)


class _Coming:
    def __init__(self, flat: torch.Tensor, letters: Box):
        self.flat, self.letters, self.number = flat, letters, letters.ask()
        spoil(flat)

    def wait(self, deadline: float) -> None:
        sent = self.letters.get(self.number, deadline)
        self.flat.view(torch.uint8).copy_(sent.flat.view(torch.uint8))
        sent.taken.set()


class MemoryTransport:
    """One rank of one communicator."""

    def __init__(self, hub: Hub, meeting: Meeting):
        self.hub, self.name, self.rank, self.world_size = hub, meeting.name, meeting.rank, meeting.world_size

    def send(self, flat: torch.Tensor, peer: int, deadline: float) -> _Sent:
        sent = _Sent(self.hub, flat)
        self.hub.letters(self.name, self.rank, peer).put(sent)
        return sent

    def receive(self, flat: torch.Tensor, peer: int, deadline: float) -> _Coming:
        return _Coming(flat, self.hub.letters(self.name, peer, self.rank))

    def broadcast(self, flat: torch.Tensor, deadline: float):
        if self.rank:
            return self.receive(flat, 0, deadline)
        return PendingAll([self.send(flat, peer, deadline) for peer in range(1, self.world_size)])

    def all_gather(self, flat: torch.Tensor, deadline: float) -> PendingAll:
        slices = flat.chunk(self.world_size)
        peers = [rank for rank in range(self.world_size) if rank != self.rank]
        return PendingAll([*(self.receive(slices[peer], peer, deadline) for peer in peers),
                           *(self.send(slices[self.rank].clone(), peer, deadline) for peer in peers)])

    def close(self) -> None:
        for peer in range(self.world_size):
            self.hub.letters(self.name, self.rank, peer).close()
            self.hub.letters(self.name, peer, self.rank).close()
