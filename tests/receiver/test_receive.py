"""Receivers over real gloo links, in threads: whole syncs, broken ones, and those that must be refused."""
import threading
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from mrl.receiver.mrl_receiver.gloo import GlooTransport
from mrl.receiver.mrl_receiver.links import LinkError, Meeting, open_store
from mrl.receiver.mrl_receiver.receive import Receiver, Refused
from mrl.receiver.mrl_receiver.wire import Plan, SyncRequest, ready_key
from tests.receiver.toy import ToyModel, expect, flat_of, tensors, wire_plan


class Sender:
    """The trainer's end of one link, by hand."""

    def __init__(self, workers: int):
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.workers, self.plan = workers, Plan.from_wire(wire_plan())
        self.transport, self.links = None, 0

    def request(self, step: int, **changes) -> SyncRequest:
        """For this sender's link, which is built if need be."""
        request = SyncRequest(
            run_id="run", engine=0, incarnation=1, version=(0, step), push=step, link=f"link/{self.links}",
            connect=self.transport is None, store_host="127.0.0.1",
            store_port=self.store.port, plan=wire_plan(), buffers=2, transport="gloo", verify=False, deadline_s=20.0)
        return replace(request, **changes)

    def connect(self, request: SyncRequest) -> None:
        self.store.wait([ready_key(request, worker) for worker in range(self.workers)])
        if self.transport is None:
            store = open_store("127.0.0.1", self.store.port, time.monotonic() + 20)
            self.transport = GlooTransport(
                Meeting(store, "127.0.0.1", request.link, "0", 0, 1 + self.workers, torch.device("cpu")),
                time.monotonic() + 20)

    def send(self, request: SyncRequest, values, count: int = 99) -> None:
        """Send the first `count` buckets."""
        self.connect(request)
        for bucket in self.plan.buckets[:count]:
            deadline = time.monotonic() + request.deadline_s
            self.transport.broadcast(flat_of(bucket, values), deadline).wait(deadline)

    def hang_up(self) -> None:
        self.transport.close()
        self.transport, self.links = None, self.links + 1


def make(tp: int) -> tuple[Sender, list[Receiver]]:
    models = [ToyModel(rank, tp) for rank in range(tp)]
    return Sender(tp), [Receiver(m, m.load_weights, "run", 0, 1, rank, tp) for rank, m in enumerate(models)]


def receive(receivers: list[Receiver], request: SyncRequest) -> tuple[list[threading.Thread], list]:
    outcomes: list = [None] * len(receivers)

    def work(i: int) -> None:
        try:
            receivers[i].prepare(request)
            outcomes[i] = receivers[i].receive(request)
        except Exception as error:
            outcomes[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(receivers))]
    for thread in threads:
        thread.start()
    return threads, outcomes


def sync(sender: Sender, receivers: list[Receiver], request: SyncRequest, values, count: int = 99) -> list:
    threads, outcomes = receive(receivers, request)
    sender.send(request, values, count)
    if count < len(sender.plan.buckets):
        sender.hang_up()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return outcomes


@pytest.mark.parametrize("tp", [1, 2])
def test_syncs_in_a_row_over_one_link(tp):
    sender, receivers = make(tp)
    for step in (1, 2, 3):
        outcomes = sync(sender, receivers, sender.request(step), tensors(step))
        assert all(isinstance(outcome, dict) for outcome in outcomes), outcomes
        for receiver in receivers:
            assert not receiver.dirty and receiver.accepted == (0, step)
            expect(receiver.model, tensors(step))


def test_a_sender_that_goes_away_leaves_them_dirty_and_a_new_link_heals_them():
    sender, receivers = make(2)
    sync(sender, receivers, sender.request(1), tensors(1))
    began = time.monotonic()
    outcomes = sync(sender, receivers, sender.request(2), tensors(2), count=1)
    assert all(isinstance(outcome, LinkError) for outcome in outcomes), outcomes
    assert time.monotonic() - began < 10, "they waited for the deadline instead of noticing"
    assert all(receiver.dirty for receiver in receivers)
    sync(sender, receivers, sender.request(2), tensors(2))
    for receiver in receivers:
        assert not receiver.dirty
        expect(receiver.model, tensors(2))


def test_a_link_that_the_receiver_has_given_up_is_not_waited_for():
    sender, receivers = make(1)
    sync(sender, receivers, sender.request(1), tensors(1))
    receivers[0].close()
    began = time.monotonic()
    with pytest.raises(LinkError, match="link/0 is gone; the next push builds another"):
        receivers[0].receive(sender.request(2))
    assert time.monotonic() - began < 2


def test_a_silent_sender_runs_into_the_deadline():
    sender, receivers = make(1)
    request = sender.request(1, deadline_s=1.5)
    threads, outcomes = receive(receivers, request)
    sender.connect(request)
    threads[0].join(10)
    assert isinstance(outcomes[0], LinkError) and receivers[0].dirty


def test_a_failing_receiver_is_noticed_by_the_sender():
    sender, receivers = make(1)
    sync(sender, receivers, sender.request(1), tensors(1))
    receivers[0].routes[0].apply = lambda *_: 1 / 0
    request = sender.request(2)
    threads, outcomes = receive(receivers, request)
    began = time.monotonic()
    with pytest.raises(LinkError):
        for _ in range(50):  # small messages fit into the socket's buffer: the loss shows after a few
            sender.send(request, tensors(2))
    threads[0].join(10)
    assert time.monotonic() - began < 10
    assert isinstance(outcomes[0], ZeroDivisionError) and receivers[0].dirty


def test_a_failing_receiver_leaves_no_thread_behind():
    sender, receivers = make(1)
    sync(sender, receivers, sender.request(1), tensors(1))
    plain = receivers[0].routes[0].apply
    arrived = threading.Event()  # as many buckets as there are buffers, so that the receiving thread waits for one
    receivers[0].routes[0].apply = lambda *_: (arrived.wait(10), 1 / 0)
    request = sender.request(2)
    threads, outcomes = receive(receivers, request)
    sender.send(request, tensors(2), count=request.buffers)
    began = time.monotonic()
    arrived.set()
    threads[0].join(10)
    assert isinstance(outcomes[0], ZeroDivisionError), outcomes
    assert time.monotonic() - began < 5, "only the deadline ended it"
    assert not [thread for thread in threading.enumerate() if thread.name == "mrl-receive"]
    receivers[0].routes[0].apply = plain
    sender.hang_up()
    sync(sender, receivers, sender.request(2), tensors(2))
    expect(receivers[0].model, tensors(2))


@pytest.mark.parametrize("changes, words", [
    ({"run_id": "other"}, "run 'other'"), ({"engine": 3}, "engine 3"), ({"incarnation": 2}, "incarnation 2"),
    ({"version": (0, 4)}, "0:4 is older than 0:5"), ({"transport": "carrier pigeon"}, "carrier pigeon"),
])
def test_refusals_change_nothing(changes, words):
    sender, receivers = make(1)
    sync(sender, receivers, sender.request(5), tensors(5))
    for method in (receivers[0].prepare, receivers[0].receive):
        with pytest.raises(Refused, match=words):
            method(sender.request(6, **changes))
    assert not receivers[0].dirty
    expect(receivers[0].model, tensors(5))
    sync(sender, receivers, sender.request(6), tensors(6))
    expect(receivers[0].model, tensors(6))


def test_a_later_attempt_is_newer_than_any_step():
    sender, receivers = make(1)
    sync(sender, receivers, sender.request(5), tensors(5))
    sync(sender, receivers, sender.request(9, version=(1, 0)), tensors(6))
    assert receivers[0].accepted == (1, 0)


def test_checksums_travel_and_scrambling_is_seen():
    sender, receivers = make(1)
    request = sender.request(1, verify=True)
    threads, outcomes = receive(receivers, request)
    sender.send(request, tensors(1))
    deadline = time.monotonic() + 10
    sender.transport.broadcast(torch.tensor([11, -22, 33, 44]), deadline).wait(deadline)
    threads[0].join(10)
    assert outcomes[0]["expected"] == {"embed": 11, "q": -22, "k": 33, "norm": 44}
    before = outcomes[0]["holdings"]
    assert before["norm"][0][3] is not None
    receivers[0].scramble(3)
    after = receivers[0]._holdings(with_checksums=True)
    assert all(before[name][0][3] != after[name][0][3] for name in before)
