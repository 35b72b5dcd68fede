"""Weights that are put in place from where their sender has them, in buffers or in parameters, and what a worker keeps
of that memory.

Both ends are in this process, with cuda_ipc's own sockets and messages, and its own memory for a GPU's.
"""
import ctypes
import gc
import time
import weakref

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mrl.engine.coverage import coverage_problems
from mrl.receiver.mrl_receiver.cuda_ipc import CudaIpcTransport
from mrl.receiver.mrl_receiver.in_place import InPlace, read
from mrl.receiver.mrl_receiver.links import SENDER_RANK, failed_key
from mrl.receiver.mrl_receiver.receive import Receiver
from mrl.receiver.mrl_receiver.routes import Routes
from mrl.receiver.mrl_receiver.transports import TRANSPORTS
from mrl.receiver.mrl_receiver.wire import Part, Plan, row_major
from tests.receiver.senders import Senders, sync
from tests.receiver.toy import ToyMoe, expect, tensors, wire_plan
from tests.waiting import wait_until

BUCKETS = (("embed", "q", "k", "norm", "o"), ("base", "flipped", "pair.a"), ("pair.b",))


class OneProcess(CudaIpcTransport):
    """Storages go from end to end as they are, by number."""

    storages: list = []
    mappings: list = []
    ends: list = []

    def __init__(self, meeting, deadline):
        super().__init__(meeting, deadline)
        OneProcess.ends.append(self)

    def broadcast(self, flat, deadline, label=None):
        if isinstance(flat, InPlace):
            return self.lend(flat, 1, deadline)
        return super().broadcast(flat, deadline, label)

    def _gpu(self) -> str:
        return "GPU-0"

    def _alias(self, storage):
        return storage

    def _export(self, storage) -> list:
        OneProcess.storages.append(torch.empty(0, dtype=torch.uint8).set_(storage).untyped_storage())
        return [len(OneProcess.storages) - 1]

    def _map(self, exported) -> torch.UntypedStorage:
        storage, OneProcess.storages[exported[0]] = OneProcess.storages[exported[0]], None
        memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
        mapping = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        OneProcess.mappings.append(StorageWeakRef(mapping))
        return mapping

    @classmethod
    def nothing_is_held(cls) -> bool:
        """Of what was ever mapped, also by views."""
        return all(mapping.expired() for mapping in cls.mappings)


class Parameters:
    """A trainer's: every tensor in two halves, between whose rows something else lies, all in one storage. Stands in
    for `flat_of`."""

    def __init__(self):
        self.places, self.used = {}, 0
        self.memory = torch.full((4096,), float("nan"))
        self.known: dict[int, InPlace] = {}

    def __call__(self, one, values, dtype) -> InPlace:
        parts, views = [], []
        for part in one.parts:
            middle = part.shape[0] // 2
            for rows in ((middle, part.shape[0]), (0, middle)):
                box = (rows, *((0, size) for size in part.shape[1:]))
                parts.append(Part(part.name, part.shape, box, 0))
                views.append(self.place(part.name, rows, parts[-1].box_shape).copy_(values[part.name][slice(*rows)]))
        if id(one) not in self.known:
            self.known[id(one)] = InPlace(parts, views)
        return self.known[id(one)]

    def place(self, name: str, rows: tuple, shape: tuple) -> torch.Tensor:
        """The same in every sync."""
        first = self.places.setdefault((name, rows), self.used)
        if first == self.used:
            self.used += shape[0] * 20
        strides = (20, *(row_major(shape[1:])))
        return self.memory.as_strided(shape, strides, first)

    def move(self) -> None:
        """The memory is given up and taken back elsewhere."""
        size, self.others = self.memory.untyped_storage().nbytes(), torch.empty(4096)
        self.memory.untyped_storage().resize_(0)
        self.others = torch.empty(4096)  # takes the place that has become free
        self.memory.untyped_storage().resize_(size)
        self.memory.fill_(float("nan"))


@pytest.fixture
def pair(monkeypatch):
    """Senders that keep their buffers from sync to sync, and one worker."""
    monkeypatch.setitem(TRANSPORTS, "cuda_ipc", OneProcess)
    OneProcess.ends.clear()
    OneProcess.mappings.clear()
    experts = [f"experts.{expert}.{kind}" for expert in range(4) for kind in ("gate", "up", "down")]
    senders, model = Senders(wire_plan(buckets=(*BUCKETS, experts)), "cuda_ipc"), ToyMoe(0, 1)
    yield senders, Receiver(model, model.load_weights, "run", 0, 1, 0, 1, model.refresh)
    senders.hang_up()


def push(senders: Senders, receiver: Receiver, step: int, **changes) -> object:
    """A sync as a trainer's links end it: what became of it on the worker."""
    count = changes.pop("count", 99)
    outcome, = sync(senders, [receiver], senders.request(step, **changes), tensors(step), count)
    for end in OneProcess.ends:
        if end.meeting.rank == SENDER_RANK:
            end.let_go()
    return outcome


def mapped() -> list:
    """What a receiver's end has mapped."""
    return [one for end in OneProcess.ends for peer in end.peers.values() for one in peer.mapped.values()]


def test_every_tensor_arrives_without_memory_of_the_worker(pair):
    senders, receiver = pair
    for step in (1, 2, 3):
        reply, = sync(senders, [receiver], senders.request(step, verify=True), tensors(step))
        assert isinstance(reply, dict), reply
        expect(receiver.model, tensors(step))
        assert coverage_problems(senders.plan.tensors, [reply], reply["expected"]) == []
    assert receiver.prepared.lent and not receiver.prepared.ring and not receiver.prepared.routes.staging


def test_views_are_made_once_for_memory_that_stays_and_go_with_the_link(pair):
    senders, receiver = pair
    kept: dict = {}  # as a trainer's ring does
    plain = senders.flat_of

    def same_memory(one, values, dtype):
        flat = plain(one, values, dtype)
        return kept.setdefault(id(one), flat).copy_(flat)

    senders.flat_of = same_memory
    sync(senders, [receiver], senders.request(1), tensors(1))
    made = [[*one.made.values()] for one in mapped()]
    assert len(made) == len(senders.plan.buckets)
    sync(senders, [receiver], senders.request(2), tensors(2))
    assert [[*one.made.values()] for one in mapped()] == made, "views were made again"
    expect(receiver.model, tensors(2))
    watched = [weakref.ref(arrival.copies) for arrivals in made for arrival in arrivals]
    made.clear()
    receiver.close()
    gc.collect()
    assert not mapped() and not any(copies() for copies in watched)


def test_parameters_are_read_where_they_lie(pair, monkeypatch):
    """Routes to them are made once, though their memory may be elsewhere in each sync."""
    senders, receiver = pair
    senders.flat_of, made, plain = Parameters(), [], Routes.arrival_of
    monkeypatch.setattr(Routes, "arrival_of", lambda *arguments: made.append(1) or plain(*arguments))
    for step in (1, 2, 3):
        reply = push(senders, receiver, step, verify=step != 2)
        assert isinstance(reply, dict), reply
        expect(receiver.model, tensors(step))
        assert step == 2 or coverage_problems(senders.plan.tensors, [reply], reply["expected"]) == []
        assert not mapped() and OneProcess.nothing_is_held()
        senders.flat_of.move()
    assert len(made) == len(senders.plan.buckets) and not receiver.prepared.routes.staging
    assert len(OneProcess.mappings) == 3


def test_an_engine_whose_sync_over_parameters_failed_is_whole_after_the_next(pair):
    senders, receiver = pair
    senders.flat_of = Parameters()
    push(senders, receiver, 1)
    error = push(senders, receiver, 2, count=2)
    assert isinstance(error, Exception) and receiver.dirty
    del error
    assert not mapped() and OneProcess.nothing_is_held()
    senders.flat_of.move()
    reply = push(senders, receiver, 3)
    assert isinstance(reply, dict) and not receiver.dirty
    expect(receiver.model, tensors(3))


def test_what_was_lent_for_a_sync_that_the_engine_refuses_is_let_go(pair):
    """It was announced, so that the worker has begun to receive it."""
    senders, receiver = pair
    senders.flat_of = Parameters()
    push(senders, receiver, 1)
    request = senders.request(2)
    senders.connect(request)
    one, = senders.plan.buckets[0].slices
    senders.broadcasts[0].broadcast(senders.flat_of(one, tensors(2), torch.float32), time.monotonic() + 60)
    wait_until(mapped)
    senders.store.set(failed_key(request.link), "1")
    wait_until(lambda: not mapped() and OneProcess.nothing_is_held())
    expect(receiver.model, tensors(1))


def test_parts_that_are_not_the_bucket_are_refused():
    bucket = Plan.from_wire(wire_plan(buckets=(("embed", "q", "k", "norm"),))).buckets[0]
    one, = bucket.slices
    held = Parameters()(one, tensors(1), torch.float32)
    whole = read(held.description, bucket, held.storages)
    assert [part.name for part, _ in whole] == [name for name in ("embed", "q", "k", "norm") for _ in range(2)]
    for part, values in whole:
        assert torch.equal(values, tensors(1)[part.name][tuple(slice(*span) for span in part.box)])
    less = InPlace(held.parts[1:], held.values[1:])
    with pytest.raises(ValueError, match="is not all of bucket 0"):
        read(less.description, bucket, less.storages)
    other = Part("o", (6, 8), ((0, 6), (0, 8)), 0)
    more = InPlace([*held.parts, other], [*held.values, torch.zeros(6, 8)])
    with pytest.raises(ValueError, match="o is not in bucket 0"):
        read(more.description, bucket, more.storages)
