"""A sync that begins at its worker when it is announced, before the engine's call: what it may do until then."""
import threading
import time

import pytest

from mrl.receiver.mrl_receiver.links import LinkError, failed_key
from mrl.receiver.mrl_receiver.receive import Receiver
from tests.receiver.senders import Senders, sync
from tests.receiver.toy import ToyModel, expect, tensors, wire_plan


@pytest.fixture
def pair():
    """Senders, and a worker that has received version 1 of them."""
    senders, model = Senders(wire_plan()), ToyModel(0, 1)
    receiver = Receiver(model, model.load_weights, "run", 0, 1, 0, 1)
    sync(senders, [receiver], senders.request(1), tensors(1))
    yield senders, receiver
    receiver.close()
    senders.hang_up()


def begun(senders, request, outcomes: list) -> threading.Thread:
    """Senders that have begun a sync nobody has called for; what ends them is in `outcomes`."""
    def send() -> None:
        try:
            senders.send(request, tensors(2))
        except LinkError as error:
            outcomes.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def receiving() -> bool:
    return any(thread.name == "mrl-receive" for thread in threading.enumerate())


def until(condition) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_buckets_arrive_before_the_call_and_are_put_in_place_by_it(pair):
    senders, receiver = pair
    request, outcomes = senders.request(2), []
    thread = begun(senders, request, outcomes)
    until(lambda: not receiver.announced.found.empty())
    incoming = receiver.announced.found.queue[0][1]
    until(lambda: incoming.stages[-1].done.qsize() == request.buffers)  # the ring is full
    expect(receiver.model, tensors(1))
    assert not receiver.dirty and receiver.held == 1
    receiver.receive(request)
    thread.join(100)
    expect(receiver.model, tensors(2))
    assert not receiver.dirty and receiver.held == 2 and not outcomes


def test_a_sync_that_was_refused_is_let_go_and_nothing_has_changed(pair):
    senders, receiver = pair
    request = senders.request(2)
    thread = begun(senders, request, [])
    until(receiving)
    senders.store.set(failed_key(request.link), "1")  # rank 0, to whom the gate has said no
    until(lambda: not receiving())
    thread.join(100)
    expect(receiver.model, tensors(1))
    assert not receiver.dirty
    with pytest.raises(LinkError):
        receiver.receive(request)
    senders.hang_up()
    sync(senders, [receiver], senders.request(3), tensors(3))
    expect(receiver.model, tensors(3))


def test_an_announcement_is_for_one_push_and_must_come(pair):
    senders, receiver = pair
    request = senders.request(2)
    thread = begun(senders, request, [])
    with pytest.raises(LinkError, match="push 2 was announced, and push 5 is asked for"):
        receiver.receive(senders.request(5))
    thread.join(100)
    senders.hang_up()
    sync(senders, [receiver], senders.request(6), tensors(2))
    with pytest.raises(LinkError, match="push 7 was not announced in time"):
        receiver.receive(senders.request(7, deadline_s=0.05))


def test_a_worker_that_closes_leaves_no_thread_that_waits(pair):
    _, receiver = pair
    waiting = receiver.announced
    receiver.close()
    assert not waiting.is_alive() and receiver.announced is None
