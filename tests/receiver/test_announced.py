"""A sync that begins at its worker when it is announced, before the engine's call: what it may do until then."""
import atexit
import queue
import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from mrl.receiver.mrl_receiver.announced import Announced
from mrl.receiver.mrl_receiver.links import LinkError, failed_key
from mrl.receiver.mrl_receiver.receive import Receiver
from tests.receiver.senders import Senders, sync
from tests.receiver.toy import ToyModel, expect, tensors, wire_plan
from tests.waiting import wait_until


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


def test_buckets_arrive_before_the_call_and_are_put_in_place_by_it(pair):
    senders, receiver = pair
    request, outcomes = senders.request(2), []
    thread = begun(senders, request, outcomes)
    wait_until(lambda: not receiver.announced.found.empty())
    incoming = receiver.announced.found.queue[0][1]
    wait_until(lambda: incoming.stages[-1].done.qsize() == request.buffers)  # the ring is full
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
    wait_until(receiving)
    senders.store.set(failed_key(request.link), "1")  # rank 0, to whom the gate has said no
    wait_until(lambda: not receiving())
    thread.join(100)
    expect(receiver.model, tensors(1))
    assert not receiver.dirty
    with pytest.raises(LinkError):
        receiver.receive(request)
    senders.hang_up()
    sync(senders, [receiver], senders.request(3), tensors(3))
    expect(receiver.model, tensors(3))


def test_only_one_side_gives_up_what_has_begun(monkeypatch):
    """The engine's call may come just as the link is seen to have failed: then whoever made it finds out by itself."""
    given_up, taken = [], []
    incoming = SimpleNamespace(give_up=lambda: given_up.append(1))
    for called in (True, False):
        waiting = Announced(dist.HashStore(), dist.HashStore(), "link", None)
        atexit.unregister(waiting.close)  # it is never started
        waiting.found.put((2, incoming))
        monkeypatch.setattr(waiting, "_failed", lambda: not called or taken.append(waiting.found.get_nowait()) is None)
        waiting._watch(incoming)
        assert given_up == ([] if called else [1])
    assert taken == [(2, incoming)] and waiting.found.get_nowait() == (2, incoming)
    with pytest.raises(queue.Empty):
        waiting.found.get_nowait()


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
