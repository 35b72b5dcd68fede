"""The pipeline without a network: what every link gets, when a buffer is used again, and links that break."""
import json
import threading
import time

import pytest
import torch
import torch.distributed as dist

from mrl.receiver.mrl_receiver.checksum import checksum, whole
from mrl.receiver.mrl_receiver.links import LinkError, failed_key
from mrl.receiver.mrl_receiver.wire import SyncRequest, ready_key, sums_key
from mrl.reshard.engine_layout import EngineLayout
from mrl.reshard.layout import Layout
from mrl.reshard.plan import SyncOptions, plan_sync
from mrl.reshard.spec import model_spec, read_config
from mrl.stream.gather import Gatherer
from mrl.stream.links import Link, Links, Target, seats
from mrl.stream.pipeline import stream
from tests.stream.tiny import FakeTrainer, weights

ENGINES = 3


class RecordingTransport:
    """Reads a buffer only when it is waited for, as late as a slow receiver would."""

    def __init__(self, delay_s: float = 0.0, fail_at: int = -1):
        self.delay_s, self.fail_at, self.received, self.closed = delay_s, fail_at, [], False
        self.under_way = 0

    def broadcast(self, flat, deadline, label):
        transport = self
        transport.under_way += 1

        class Pending:
            def wait(self, deadline):
                if len(transport.received) == transport.fail_at:
                    raise LinkError("cut")
                time.sleep(transport.delay_s)
                transport.received.append((flat.clone(), label))
                transport.under_way -= 1

        return Pending()

    def send(self, flat, peer, deadline, label):
        return self.broadcast(flat, deadline, label)

    def close(self):
        self.closed = True


def target(engine: int, verify: bool = True, connect: bool = False) -> Target:
    return Target(SyncRequest("run", engine, 1, (0, 1), 0, f"link/{engine}", connect, "127.0.0.1", 1, {}, 2, "gloo",
                              verify, 5.0), workers=1)


class Sender:
    """The one rank of a gang that sends to engines 0 … ENGINES-1; `transports` are its open links, by engine."""

    def __init__(self, model, targets: list[Target], transports: dict[int, RecordingTransport],
                 strategy: str = "broadcast"):
        self.targets = targets
        self.trainer = FakeTrainer(model, Layout(), Layout().coord(0))
        self.trainer.become(weights(model, 1))
        self.plan = plan_sync(model_spec(read_config(model)), Layout(), EngineLayout(count=ENGINES),
                              SyncOptions(60_000, "float32", te=False, strategy=strategy))
        assert len(self.plan.outline) > 4
        self.gatherer = Gatherer(self.plan, 0, self.trainer.params, frozenset(one.request.engine for one in targets),
                                 buffers=2)
        store = dist.HashStore()
        for one in targets:
            if one.request.engine in transports:
                store.set(ready_key(one.request, 0), "1")
        self.links = Links(0, store, torch.device("cpu"), {
            engine: Link(1, transport, transport) for engine, transport in transports.items()})

    def stream(self, timeout_s: float = 300.0):
        return stream(self.gatherer, self.links, seats(self.plan, 0), self.targets, timeout_s)


def received_tensors(transport: RecordingTransport) -> dict:
    return {part.name: part.values(flat)
            for flat, label in transport.received for part in label.parts}


def test_every_link_gets_every_bucket_and_the_checksums_however_slow_it_is(model):
    fast, slow = RecordingTransport(), RecordingTransport(delay_s=0.02)
    sender = Sender(model, [target(0), target(1)], {0: fast, 1: slow})
    sent = sender.stream()
    expected = weights(model, 1)
    assert sent.errors == {} and sent.bytes == 2 * sum(tensor.nbytes for tensor in expected.values())
    for transport in (fast, slow):
        got = received_tensors(transport)
        assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in got)
    labels = [label.key for _, label in fast.received]
    assert labels == [label.key for _, label in slow.received] and len(set(labels)) == len(labels)
    for one in sender.targets:
        sums = json.loads(sender.links.store.get(sums_key(one.request, 0)))
        assert sums == {"direct": {}, "shared": {name: checksum(tensor, whole(tuple(tensor.shape)))
                                                 for name, tensor in expected.items()}}


def test_weights_may_have_been_away_between_two_syncs_but_not_replaced(model):
    """Views are made once, and follow memory that was given up and taken back elsewhere."""
    transport = RecordingTransport()
    sender = Sender(model, [target(0)], {0: transport})
    params, engines = sender.trainer.params, frozenset({0})
    kept = {name: param.clone() for name, param in params.items()}
    for param in params.values():
        param.untyped_storage().resize_(0)
    others = [torch.empty_like(value) for value in kept.values()]  # takes the places that have become free
    for name, param in params.items():
        param.untyped_storage().resize_(kept[name].nbytes)
        param.copy_(kept[name])
    assert others and sender.gatherer.current(params, engines) and not sender.gatherer.current(params, frozenset({1}))
    assert sender.stream().errors == {}
    got = received_tensors(transport)
    assert all(torch.equal(got[name], value) for name, value in weights(model, 1).items())
    assert not sender.gatherer.current({name: param.clone() for name, param in params.items()}, engines)


def test_engines_that_get_buckets_of_their_own_get_them_one_engine_at_a_time(model, monkeypatch):
    transports = {engine: RecordingTransport() for engine in range(ENGINES)}
    sender = Sender(model, [target(engine) for engine in transports], transports, "multi_sender")
    start, busy = Links.start, []

    def watched(links, *arguments):
        transfers = start(links, *arguments)
        busy.append({engine: one.under_way for engine, one in transports.items() if one.under_way})
        return transfers

    monkeypatch.setattr(Links, "start", watched)
    assert sender.stream().errors == {}
    assert all(len(engines) == 1 for engines in busy)
    assert {engine for engines in busy for engine in engines} == {0, 1, 2}
    for transport in transports.values():
        got = received_tensors(transport)
        assert all(torch.equal(got[name], tensor) for name, tensor in weights(model, 1).items())


def test_checksums_are_left_only_for_engines_that_verify(model):
    sender = Sender(model, [target(0, verify=False), target(1)], {0: RecordingTransport(), 1: RecordingTransport()})
    sender.stream()
    assert [sender.links.store.check([sums_key(one.request, 0)]) for one in sender.targets] == [False, True]


@pytest.mark.parametrize("fail_at", [0, 2])
def test_a_broken_link_is_dropped_and_the_others_go_on(model, fail_at):
    good, bad = RecordingTransport(), RecordingTransport(fail_at=fail_at)
    sender = Sender(model, [target(0), target(1)], {0: good, 1: bad})
    sent = sender.stream()
    assert sent.errors == {1: "cut"} and bad.closed and list(sender.links.open) == [0]
    assert len(good.received) == len(sender.plan.outline) and len(bad.received) == fail_at


def test_engines_that_refuse_or_never_come_are_left_out(model):
    good = RecordingTransport()
    sender = Sender(model, [target(0), target(1, connect=True), target(2, connect=True)], {0: good})
    sender.links.store.set(failed_key("link/1"), "1")
    began = time.monotonic()
    sent = sender.stream(timeout_s=6.0)
    assert 3 <= time.monotonic() - began < 60
    assert sent.errors == {1: "the engine refused the sync", 2: "the engine was not ready within 3 s"}
    assert len(good.received) == len(sender.plan.outline)


def test_a_crash_of_the_sender_reaches_the_caller(model, monkeypatch):
    monkeypatch.setattr(Links, "start", lambda *_: 1 / 0)
    sender, result = Sender(model, [target(0)], {0: RecordingTransport()}), []

    def run():
        with pytest.raises(ZeroDivisionError):
            sender.stream()
        result.append("raised")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(300)
    assert result == ["raised"], "the main thread waits for a buffer for ever"


def test_the_memory_beside_the_parameters_is_a_ring_of_slices(model):
    sender = Sender(model, [target(0)], {0: RecordingTransport()})
    longest = max(one.nbytes for bucket in sender.plan.outline for one in bucket.slices)
    assert sender.gatherer.nbytes == 2 * -(-longest // 16) * 16, "a single rank gathers nothing"
    assert len({share.content.data_ptr() for share in sender.gatherer.sends}) == 2


def test_views_follow_parameters_that_have_moved(model):
    sender = Sender(model, [target(0)], {0: RecordingTransport()})
    assert sender.gatherer.current(sender.trainer.params, frozenset({0}))
    assert not sender.gatherer.current(sender.trainer.params, frozenset({0, 1}))
    moved = {name: tensor.clone() for name, tensor in sender.trainer.params.items()}
    assert not sender.gatherer.current(moved, frozenset({0}))
