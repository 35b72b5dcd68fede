"""Buckets that are put in place from where their sender has them, and what a worker keeps of that memory.

Both ends are in this process, with cuda_ipc's own sockets and messages, and its own memory for a GPU's.
"""
import gc
import weakref

import pytest
import torch

from mrl.engine.coverage import coverage_problems
from mrl.receiver.mrl_receiver.cuda_ipc import CudaIpcTransport
from mrl.receiver.mrl_receiver.receive import Receiver
from mrl.receiver.mrl_receiver.transports import TRANSPORTS
from tests.receiver.senders import Senders, sync
from tests.receiver.toy import ToyMoe, expect, tensors, wire_plan

BUCKETS = (("embed", "q", "k", "norm", "o"), ("base", "flipped", "pair.a"), ("pair.b",))


class OneProcess(CudaIpcTransport):
    """Storages go from end to end as they are, by number."""

    storages: list = []
    ends: list = []

    def __init__(self, meeting, deadline):
        super().__init__(meeting, deadline)
        OneProcess.ends.append(self)

    def _gpu(self) -> str:
        return "GPU-0"

    def _export(self, storage) -> list:
        OneProcess.storages.append(torch.empty(0, dtype=torch.uint8).set_(storage).untyped_storage())
        return [len(OneProcess.storages) - 1]

    def _map(self, exported) -> torch.UntypedStorage:
        storage, OneProcess.storages[exported[0]] = OneProcess.storages[exported[0]], None
        return storage


@pytest.fixture
def pair(monkeypatch):
    """Senders that keep their buffers from sync to sync, and one worker."""
    monkeypatch.setitem(TRANSPORTS, "cuda_ipc", OneProcess)
    OneProcess.ends.clear()
    experts = [f"experts.{expert}.{kind}" for expert in range(4) for kind in ("gate", "up", "down")]
    senders, model = Senders(wire_plan(buckets=(*BUCKETS, experts)), "cuda_ipc"), ToyMoe(0, 1)
    yield senders, Receiver(model, model.load_weights, "run", 0, 1, 0, 1, model.refresh)
    senders.hang_up()


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
