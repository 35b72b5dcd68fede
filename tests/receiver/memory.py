"""A transport between threads that is as unkind as the contract allows, for tests of what may be done with a buffer."""
from __future__ import annotations

import queue
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
        self.boxes: dict[tuple, queue.Queue] = {}
        self.under_way: Counter[int] = Counter()  # transfers that still have to read a buffer, by address

    def letters(self, name: str, sender: int, receiver: int) -> queue.Queue:
        """What is on its way between two ranks. Both may ask first, so that only one of them may make it."""
        with self.lock:
            return self.boxes.setdefault((name, sender, receiver), queue.Queue())

    def reads(self, flat: torch.Tensor, change: int) -> int:
        """Count transfers that have to read a buffer; how many there are now."""
        with self.lock:
            self.under_way[flat.data_ptr()] += change
            return self.under_way[flat.data_ptr()]

    def connect(self, meeting: Meeting, deadline: float) -> MemoryTransport:
        return MemoryTransport(self, meeting)


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
    def __init__(self, flat: torch.Tensor, letters: queue.Queue):
        self.flat, self.letters = flat, letters
        spoil(flat)

    def wait(self, deadline: float) -> None:
        try:
            sent = self.letters.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise LinkError("timed out") from None
        if sent is None:
            raise LinkError("a peer gave it up")
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
            self.hub.letters(self.name, self.rank, peer).put(None)
            self.hub.letters(self.name, peer, self.rank).put(None)
