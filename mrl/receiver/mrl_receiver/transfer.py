"""A worker's communicators, and the threads that bring the next buckets in while one is put in place."""
from __future__ import annotations

import queue
import threading
import time
from collections import deque
from contextlib import ExitStack
from typing import Callable, Iterable, Iterator, Optional, Sequence

import torch
import torch.distributed as dist

from .delta import HEADER, Header, whole
from .links import (SENDER_RANK, Borrowing, Lent, LinkError, Meeting, Pending, Transport, finish_stream,
                    own_stream)
from .transports import connect, connect_workers
from .wire import BROADCAST, NODE, PEERS, Bucket, Plan, Slice, SyncRequest


class Connections:
    """The worker's end of one link: what `plan` needs of it. All ranks build theirs in the order below.

    headers: of the slices of every bucket that has arrived and has not been put in place, by its index; only with
    request.delta, where each slice has one and its payload lies at the beginning of its place.
    """

    def __init__(self, plan: Plan, worker: int, request: SyncRequest, store: dist.Store, device: torch.device,
                 deadline: float):
        """LinkError when a peer stays away."""
        def build(part: str, rank: int, world_size: int, meet: Callable[..., Transport] = connect) -> Transport:
            transport = meet(request.transport, Meeting(store, request.store_host, request.link, part, rank,
                                                        world_size, device), deadline)
            unfinished.callback(transport.close)
            self.all.append(transport)
            return transport

        self.device = device
        self.place = worker % plan.node
        self.headers: Optional[dict[int, list[Header]]] = {} if request.delta else None
        self.all: list[Transport] = []
        with ExitStack() as unfinished:
            self.broadcasts = {sender: build(BROADCAST.format(sender), 1 + worker, 1 + plan.workers)
                               for sender in plan.broadcasters}
            self.peers = build(PEERS, plan.senders + worker, plan.senders + plan.workers) \
                if plan.point_to_point else None
            self.neighbours = build(NODE.format(worker // plan.node), self.place, plan.node, connect_workers) \
                if plan.gathers else None
            unfinished.pop_all()

    def begin(self, bucket: Bucket, flat: torch.Tensor, deadline: float) -> Optional[Pending]:
        """Begin to receive what comes from a sender into its place in `flat`. None: nothing comes. LinkError."""
        place = self.place if bucket.mode == "slices" else 0
        one = bucket.slices[place]
        mine = flat[place * bucket.slice_numel:][:one.numel]
        if self.headers is not None:
            header = self._header(bucket, one, deadline) if one.numel else whole(mine)
            self.headers[bucket.index] = [header]
            mine = mine.view(torch.uint8)[:header.nbytes]
        return self._receive(bucket, one, mine, deadline) if mine.numel() else None

    def borrow(self, bucket: Bucket, deadline: float) -> Optional[Borrowing]:
        """Begin to borrow what the only sender of a bucket has for it. None: nothing. LinkError."""
        one, = bucket.slices
        if not one.numel:
            return None
        transport, peer = (self.broadcasts[one.sender], SENDER_RANK) if bucket.mode == "broadcast" else (
            self.peers, one.sender)
        return transport.borrow(one.numel * bucket.torch_dtype.itemsize, peer, deadline)

    def join(self, bucket: Bucket, flat: torch.Tensor, deadline: float) -> None:
        """Receive the other slices from the workers of this node. LinkError."""
        if bucket.mode != "slices" or self.neighbours is None:
            return
        if self.headers is None:
            self.neighbours.all_gather(flat, deadline).wait(deadline)
        else:
            self._join_messages(bucket, flat, deadline)

    def let_go(self) -> None:
        """Of the memory that peers have lent in this sync, buffers excepted."""
        for transport in (*self.broadcasts.values(), self.peers):
            if transport is not None:
                transport.let_go()

    def close(self) -> None:
        """Give up; the peers' ends fail too."""
        for transport in self.all:
            transport.close()

    def _receive(self, bucket: Bucket, one: Slice, into: torch.Tensor, deadline: float) -> Pending:
        if bucket.mode == "broadcast":
            return self.broadcasts[one.sender].broadcast(into, deadline)
        return self.peers.receive(into, one.sender, deadline)

    def _header(self, bucket: Bucket, one: Slice, deadline: float) -> Header:
        numbers = torch.empty(HEADER, dtype=torch.int64, device=self.device)
        self._receive(bucket, one, numbers, deadline).wait(deadline)
        return _read_header(numbers, bucket, one)

    def _join_messages(self, bucket: Bucket, flat: torch.Tensor, deadline: float) -> None:
        """Exchange first the headers, then the payloads, all padded to the longest of them."""
        count = len(bucket.slices)
        numbers = torch.empty(count, HEADER, dtype=torch.int64, device=self.device)
        numbers[self.place] = torch.tensor(self.headers[bucket.index][0])
        self.neighbours.all_gather(numbers.view(-1), deadline).wait(deadline)
        headers = [_read_header(given, bucket, one) for given, one in zip(numbers, bucket.slices)]
        self.headers[bucket.index] = headers
        places = flat.view(torch.uint8).view(count, -1)
        longest = max(header.nbytes for header in headers)
        if 2 * longest > places.shape[1]:  # hardly less than all, which needs no more memory
            self.neighbours.all_gather(flat, deadline).wait(deadline)
        elif longest:
            gathered = torch.empty(count, longest, dtype=torch.uint8, device=self.device)
            gathered[self.place] = places[self.place, :longest]
            self.neighbours.all_gather(gathered.view(-1), deadline).wait(deadline)
            places[:, :longest] = gathered
            finish_stream(self.device)  # another thread will read them


def _read_header(numbers: torch.Tensor, bucket: Bucket, one: Slice) -> Header:
    try:
        return Header.read(numbers, one.numel, bucket.torch_dtype.itemsize)
    except ValueError as error:
        raise LinkError(f"bucket {bucket.index}: {error}") from error


class _Stage(threading.Thread):
    """Does its work on every position that comes, and hands it on; an error, upon which `fail` is called, in its place.
    """

    def __init__(self, work: Callable[[int], None], coming: Iterable[int | Exception], device: torch.device,
                 fail: Callable[[], None]):
        super().__init__(name="mrl-receive", daemon=True)
        self.work, self.coming, self.device, self.fail = work, coming, device, fail
        self.done: queue.Queue[int | Exception] = queue.Queue()

    def run(self) -> None:
        try:
            with own_stream(self.device):
                for position in self.coming:
                    if isinstance(position, Exception):
                        raise position
                    self.work(position)
                    self.done.put(position)
        except Exception as error:
            self.fail()
            self.done.put(error)


class Incoming:
    """The buckets of one sync on their way in, received by threads from now on, before anybody puts them in place.

    slots: by bucket, where it arrives; `ring` positions apart they share their memory: one is received into again only
    when it has been put in place. None: buckets are borrowed from the sender, which waits for `ring` of them at a time.
    The next transfer is queued behind the one under way as soon as its slot is free, so that the wire never waits for a
    thread.
    """

    def __init__(self, buckets: Sequence[Bucket], slots: Optional[Sequence[torch.Tensor]], ring: int,
                 connections: Connections, deadline: float):
        self.buckets, self.slots, self.connections, self.deadline = buckets, slots, connections, deadline
        self.free, self.given_up, self.closing = threading.Semaphore(ring), threading.Event(), threading.Lock()
        self.pending: dict[int, Optional[Pending | Borrowing]] = {}
        self.lent: dict[int, Lent] = {}
        self.applied: deque[tuple[Callable[[], None], Optional[Lent]]] = deque()  # what waits for it; what to return
        self.began = time.monotonic()
        stages = [_Stage(self._begin, self._turns(), connections.device, self._abandon)]
        gathers = connections.neighbours is not None
        for work in (self._arrive, self._join) if gathers else (self._arrive,):
            stages.append(_Stage(work, _coming(stages[-1].done, len(buckets)), connections.device, self._abandon))
        self.stages = stages
        for stage in stages:
            stage.start()

    def put_in_place(self, apply: Callable[[int, Optional[Lent]], Callable[[], None]]) -> dict[str, float]:
        """`apply(position, what was lent)` every bucket, in order, in this thread; what it returns waits until the
        bucket has been read. If the next one is there, and was lent, it is applied before that, so that the device has
        something to do. (If it was received, its slot is wanted at once for another.)

        Returns the seconds of waiting for buckets ("receive_s") and of apply ("apply_s"). When anything fails the
        connections are closed and the error is raised.
        """
        seconds, ahead = {"receive_s": 0.0, "apply_s": 0.0}, 1 if self.slots is None else 0
        try:
            for _ in self.buckets:
                if self.stages[-1].done.empty():
                    self._finish(seconds, left=0)
                self._put_next(apply, seconds)
                self._finish(seconds, left=ahead)
            self._finish(seconds, left=0)
        except BaseException:
            try:
                finish_stream(self.connections.device)  # what has been queued may read memory that is about to go
            finally:
                self.applied.clear()
                self.give_up()
            raise
        for stage in self.stages:
            stage.join()
        return seconds

    def give_up(self) -> None:
        """End the threads, and the connections: none may wait for a slot for ever, nor fill one during a later sync."""
        self._abandon()
        for stage in self.stages:
            stage.join()
        self.lent.clear()  # this may be kept for a while, and what was lent is wanted back

    def _put_next(self, apply: Callable[[int, Optional[Lent]], Callable[[], None]], seconds: dict[str, float]) -> None:
        began = time.monotonic()
        position = self.stages[-1].done.get()  # the threads always put something by the deadline
        if isinstance(position, Exception):
            raise position
        arrived = time.monotonic()
        self.applied.append((apply(position, self.lent.get(position)), self.lent.pop(position, None)))
        seconds["receive_s"] += arrived - began
        seconds["apply_s"] += time.monotonic() - arrived

    def _finish(self, seconds: dict[str, float], left: int) -> None:
        """Give back buckets that were applied, but for so many."""
        began = time.monotonic()
        while len(self.applied) > left:
            self.applied[0][0]()
            _, lent = self.applied.popleft()
            if lent is not None:
                lent.give_back()
            self.free.release()
        seconds["apply_s"] += time.monotonic() - began

    def _abandon(self) -> None:
        """At once, as nobody may have asked for the buckets yet: a transfer that waits for a peer keeps a GPU busy."""
        self.given_up.set()
        self.free.release()
        with self.closing:
            self.connections.close()

    def _turns(self) -> Iterator[int]:
        for position in range(len(self.buckets)):
            self.free.acquire()
            if self.given_up.is_set():
                raise LinkError("the sync was given up")
            yield position

    def _begin(self, position: int) -> None:
        bucket = self.buckets[position]
        if self.slots is None:
            self.pending[position] = self.connections.borrow(bucket, self.deadline)
        else:
            self.pending[position] = self.connections.begin(bucket, self.slots[position], self.deadline)

    def _arrive(self, position: int) -> None:
        transfer = self.pending.pop(position)
        if self.slots is None and transfer is not None:
            self.lent[position] = transfer.wait(self.deadline)
        elif transfer is not None:
            transfer.wait(self.deadline)

    def _join(self, position: int) -> None:
        self.connections.join(self.buckets[position], self.slots[position], self.deadline)


def _coming(done: queue.Queue, count: int) -> Iterator[int | Exception]:
    return (done.get() for _ in range(count))
