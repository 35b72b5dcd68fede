"""Receivers over real gloo links, in threads: whole syncs of every kind, broken ones, and those to be refused."""
import threading
import time
from dataclasses import replace

import pytest
import torch

from mrl.engine.coverage import coverage_problems
from mrl.receiver.mrl_receiver import receive as module
from mrl.receiver.mrl_receiver.links import LinkError, failed_key
from mrl.receiver.mrl_receiver.receive import Receiver, Refused
from mrl.receiver.mrl_receiver.trace import TraceError
from mrl.receiver.mrl_receiver.transports import TRANSPORTS
from tests.receiver.memory import Hub
from tests.receiver.senders import Senders, receive, sync
from tests.receiver.toy import SHAPES, Draft, ToyModel, ToyMoe, expect, mixed_plan, rows, tensors, wire_plan


def make(tp: int, kind=ToyModel, wire=None, transport="gloo") -> tuple[Senders, list[Receiver]]:
    models = [kind(rank, tp) for rank in range(tp)]
    return Senders(wire or wire_plan(workers=tp), transport), [
        Receiver(m, m.load_weights, "run", 0, 1, rank, tp, m.refresh) for rank, m in enumerate(models)]


@pytest.mark.parametrize("tp", [1, 2])
def test_syncs_in_a_row_over_one_link(tp):
    senders, receivers = make(tp)
    for step in (1, 2, 3):
        outcomes = sync(senders, receivers, senders.request(step), tensors(step))
        assert all(isinstance(outcome, dict) for outcome in outcomes), outcomes
        for receiver in receivers:
            assert not receiver.dirty and receiver.accepted == (0, step)
            expect(receiver.model, tensors(step))


def slowly(monkeypatch):
    """Putting a bucket in place takes longer than receiving the next."""
    plain = module.Routes.apply
    monkeypatch.setattr(module.Routes, "apply", lambda self, *given: (time.sleep(0.01), plain(self, *given)))


@pytest.mark.parametrize("transport", ["gloo", "unkind"])
@pytest.mark.parametrize("buffers", [1, 3])
def test_a_sync_of_every_mode_at_once_verified_and_in_the_promised_memory(monkeypatch, transport, buffers):
    monkeypatch.setitem(TRANSPORTS, "unkind", Hub().connect)
    senders, receivers = make(2, ToyMoe, mixed_plan(), transport)
    slowly(monkeypatch)
    for step in (1, 2):
        request = senders.request(step, verify=True, buffers=buffers)
        outcomes = sync(senders, receivers, request, tensors(step))
        assert all(isinstance(outcome, dict) for outcome in outcomes), outcomes
        for receiver in receivers:
            expect(receiver.model, tensors(step))
        assert coverage_problems(senders.plan.tensors, outcomes, outcomes[0]["expected"]) == []
        changed = {name: dict(given) for name, given in outcomes[0]["expected"].items()}
        changed["shared"]["norm"] += 1
        changed["direct"]["1"] = {**changed["direct"]["1"], "o": 5}
        assert [text.split(":")[0] for text in coverage_problems(senders.plan.tensors, outcomes, changed)] \
            == ["norm", "o"]
        for receiver in receivers:
            receiver.scramble(7)
        scrambled = [{"holdings": module._holdings(receiver.traced, receiver.tensors), "opaque": receiver.traced.opaque}
                     for receiver in receivers]
        assert len(coverage_problems(senders.plan.tensors, scrambled, outcomes[0]["expected"])) >= len(SHAPES) - 3
    for receiver in receivers:
        largest = max(bucket.nbytes for bucket in senders.plan.of_worker(receiver.worker))
        assert sum(flat.nbytes for flat in receiver.prepared.ring) <= buffers * (largest + 15)
        assert not receiver.prepared.routes.staging


@pytest.mark.parametrize("buffers", [1, 2])
def test_as_many_transfers_are_asked_for_ahead_as_there_are_free_slots(monkeypatch, buffers):
    hub = Hub()
    monkeypatch.setitem(TRANSPORTS, "unkind", hub.connect)
    senders, receivers = make(1, transport="unkind")
    threads, outcomes = receive(receivers, senders.request(1, buffers=buffers))
    deadline = time.monotonic() + 20
    while (asked := sum(box.asked for box in hub.boxes.values())) < buffers and time.monotonic() < deadline:
        time.sleep(0.01)
    assert asked == buffers < len(senders.plan.buckets)
    senders.send(senders.request(1, buffers=buffers), tensors(1))
    for thread in threads:
        thread.join(20)
    assert isinstance(outcomes[0], dict), outcomes
    expect(receivers[0].model, tensors(1))


def test_staging_holds_only_what_the_loader_still_waits_for(monkeypatch):
    senders, (receiver,) = make(1, ToyMoe, wire_plan(buckets=(
        ("pair.a",), ("flipped",), ("embed", "q", "k", "norm"), ("pair.b",),
        [name for name in SHAPES if name.split(".")[0] in ("experts", "o", "base")])))
    held = []
    plain = module.Routes.apply

    def apply(self, *given):
        plain(self, *given)
        held.append({*self.staging})

    monkeypatch.setattr(module.Routes, "apply", apply)
    sync(senders, [receiver], senders.request(1), tensors(1))
    expect(receiver.model, tensors(1))
    assert held == [{"pair.a"}] * 3 + [set()] * 2


def test_several_nodes_each_join_their_slices():
    draft = Draft(workers=4, node=2, senders=3)
    draft.add("slices", ["base", ("flipped", rows(0, 2, 5))], [("flipped", rows(2, 3, 5)), "pair.b"], senders=[0, 2])
    draft.add("slices", ["pair.a"], [], senders=[2, 0])

    class Some(ToyMoe):
        def __init__(self, rank, tp):
            super().__init__(rank, tp)
            for name in ("embed", "head", "qk", "norm", "o", "w13", "w2"):
                delattr(self, name)

    models = [Some(0, 1) for _ in range(4)]
    senders = Senders(draft.wire())
    receivers = [Receiver(m, m.load_weights, "run", 0, 1, worker, 4, m.refresh) for worker, m in enumerate(models)]
    for step in (1, 2):
        outcomes = sync(senders, receivers, senders.request(step), tensors(step))
        assert all(isinstance(outcome, dict) for outcome in outcomes), outcomes
        for model in models:
            assert torch.equal(model.flipped, tensors(step)["flipped"].t())
            assert torch.equal(model.absorbed, tensors(step)["base"].t() * 2)


def test_shards_that_do_not_fit_change_nothing_and_a_plan_without_them_does(caplog):
    senders, receivers = make(2, ToyMoe, mixed_plan())
    sync(senders, receivers, senders.request(1), tensors(1))
    wire = mixed_plan()
    wire["buckets"][2]["worker"], wire["buckets"][6]["worker"] = 1, 0
    other = Senders(wire)
    reply = receivers[0].prepare(other.request(2, link="other"))
    assert reply["not_sharded"].keys() == {"q", "k", "o"} and not reply["proven"]
    assert sync(senders, receivers, senders.request(2), tensors(2))[0].keys() == {"receive_s", "apply_s", "transfer_s"}
    for receiver in receivers:
        expect(receiver.model, tensors(2))


def test_a_sender_that_goes_away_leaves_them_dirty_and_a_new_link_heals_them():
    for wire, kind in ((None, ToyModel), (mixed_plan(), ToyMoe)):
        senders, receivers = make(2, kind, wire)
        sync(senders, receivers, senders.request(1), tensors(1))
        began = time.monotonic()
        outcomes = sync(senders, receivers, senders.request(2), tensors(2), count=2)
        assert all(isinstance(outcome, LinkError) for outcome in outcomes), outcomes
        assert time.monotonic() - began < 100, "they waited for the deadline instead of noticing"
        assert all(receiver.dirty for receiver in receivers)
        sync(senders, receivers, senders.request(2), tensors(2))
        for receiver in receivers:
            assert not receiver.dirty
            expect(receiver.model, tensors(2))


def test_a_link_that_the_receiver_has_given_up_is_not_waited_for():
    senders, receivers = make(1)
    sync(senders, receivers, senders.request(1), tensors(1))
    receivers[0].close()
    began = time.monotonic()
    with pytest.raises(LinkError, match="link/0 is gone; the next push builds another"):
        receivers[0].receive(senders.request(2))
    assert time.monotonic() - began < 100


def test_what_came_does_not_count_when_a_peer_gave_up_meanwhile(monkeypatch):
    """With NCCL a transfer that the peer aborts may look complete."""
    monkeypatch.setitem(TRANSPORTS, "unkind", Hub().connect)
    senders, (receiver,) = make(1, transport="unkind")
    request = senders.request(1)
    senders.store.set(failed_key(request.link), "1")
    (outcome,) = sync(senders, [receiver], request, tensors(1))
    assert isinstance(outcome, LinkError) and "a peer gave it up" in str(outcome)
    assert receiver.dirty and receiver.held is None


def test_a_silent_sender_runs_into_the_deadline():
    senders, receivers = make(1)
    request = senders.request(1, deadline_s=5)
    threads, outcomes = receive(receivers, request)
    senders.connect(request)
    threads[0].join(300)
    assert isinstance(outcomes[0], LinkError) and receivers[0].dirty


def test_checksums_that_do_not_come_leave_it_dirty(monkeypatch):
    senders, receivers = make(1)
    request = senders.request(1, deadline_s=5, verify=True)
    threads, outcomes = receive(receivers, request)
    senders.send(replace(request, verify=False), tensors(1))
    threads[0].join(300)
    assert isinstance(outcomes[0], LinkError) and "checksums did not come" in str(outcomes[0])
    assert receivers[0].dirty


def test_a_failing_receiver_is_noticed_by_the_sender(monkeypatch):
    senders, receivers = make(1)
    sync(senders, receivers, senders.request(1), tensors(1))
    monkeypatch.setattr(receivers[0].prepared.routes, "apply", lambda *_: 1 / 0)
    request = senders.request(2)
    threads, outcomes = receive(receivers, request)
    began = time.monotonic()
    with pytest.raises(LinkError):
        for _ in range(50):  # small messages fit into the socket's buffer: the loss shows after a few
            senders.send(request, tensors(2))
    threads[0].join(300)
    assert time.monotonic() - began < 100
    assert isinstance(outcomes[0], ZeroDivisionError) and receivers[0].dirty


@pytest.mark.parametrize("kind, wire", [(ToyModel, wire_plan()), (ToyMoe, mixed_plan())])
def test_a_failing_receiver_leaves_no_thread_behind(monkeypatch, kind, wire):
    senders, receivers = make(wire["workers"], kind, wire)
    sync(senders, receivers, senders.request(1), tensors(1))
    arrived = threading.Event()  # as many buckets as there are buffers, so that the receiving thread waits for one
    request = senders.request(2)
    with monkeypatch.context() as patch:
        for receiver in receivers:
            patch.setattr(receiver.prepared.routes, "apply", lambda *_: (arrived.wait(300), 1 / 0))
        threads, outcomes = receive(receivers, request)
        senders.send(request, tensors(2), count=request.buffers)
        began = time.monotonic()
        arrived.set()
        for thread in threads:
            thread.join(300)
    assert isinstance(outcomes[0], ZeroDivisionError), outcomes
    assert time.monotonic() - began < 100, "only the deadline ended it"
    assert not [thread for thread in threading.enumerate() if thread.name == "mrl-receive"]
    senders.hang_up()
    sync(senders, receivers, senders.request(2), tensors(2))
    for receiver in receivers:
        expect(receiver.model, tensors(2))


@pytest.mark.parametrize("changes, words", [
    ({"run_id": "other"}, "run 'other'"), ({"engine": 3}, "engine 3"), ({"incarnation": 2}, "incarnation 2"),
    ({"version": (0, 4)}, "0:4 is older than 0:5"), ({"transport": "carrier pigeon"}, "carrier pigeon"),
])
def test_refusals_change_nothing(changes, words):
    senders, receivers = make(1)
    sync(senders, receivers, senders.request(5), tensors(5))
    for method in (receivers[0].prepare, receivers[0].prove, receivers[0].receive):
        with pytest.raises(Refused, match=words):
            method(senders.request(6, **changes))
    assert not receivers[0].dirty
    expect(receivers[0].model, tensors(5))
    sync(senders, receivers, senders.request(6), tensors(6))
    expect(receivers[0].model, tensors(6))


def test_plans_that_do_not_fit_change_nothing():
    senders, receivers = make(1)
    sync(senders, receivers, senders.request(1), tensors(1))
    for wire, error, words in [
            (wire_plan(workers=2), Refused, "for 2 workers; this engine has 1"),
            (wire_plan({"norm": (7,)}), TraceError, "norm of shape"),
            (wire_plan(buckets=(("embed", "q", "k"),)), TraceError, "parameters norm .of 1. receive nothing"),
            ({**wire_plan(), "node": 2}, ValueError, "do not make up nodes of 2")]:
        with pytest.raises(error, match=words):
            receivers[0].prepare(senders.request(2, plan=wire, link="other"))
    with pytest.raises(Refused, match="no plan has been prepared for link other"):
        receivers[0].receive(senders.request(2, link="other", connect=True))
    sync(senders, receivers, senders.request(2), tensors(2))
    expect(receivers[0].model, tensors(2))


def test_a_later_attempt_is_newer_than_any_step():
    senders, receivers = make(1)
    sync(senders, receivers, senders.request(5), tensors(5))
    sync(senders, receivers, senders.request(9, version=(1, 0)), tensors(6))
    assert receivers[0].accepted == (1, 0)


def test_a_wider_engine_is_verified_in_the_dtype_that_was_sent():
    senders, receivers = make(1, wire=wire_plan(dtype="bfloat16"))
    values = {name: tensor.bfloat16() for name, tensor in tensors(1).items()}
    (reply,) = sync(senders, receivers, senders.request(1, verify=True), values)
    expect(receivers[0].model, {name: tensor.float() for name, tensor in values.items()})
    assert coverage_problems(senders.plan.tensors, [reply], reply["expected"]) == []
