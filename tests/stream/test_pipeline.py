"""The pipeline without a network: what every link gets, when a buffer is used again, and links that break."""
import threading
import time

import pytest
import torch
import torch.distributed as dist

from mrl.receiver.mrl_receiver.checksum import checksum, whole
from mrl.receiver.mrl_receiver.links import LinkError, failed_key
from mrl.receiver.mrl_receiver.wire import SyncRequest, ready_key
from mrl.reshard.layout import Layout
from mrl.reshard.params import local_params
from mrl.reshard.plan import plan_sync
from mrl.reshard.spec import model_spec, read_config
from mrl.stream.gather import StageBuckets
from mrl.stream.links import Links, Target
from mrl.stream.pipeline import stream
from tests.stream.tiny import FakeTrainer, weights


class RecordingTransport:
    """Reads a buffer only when it is waited for, as late as a slow receiver would."""

    def __init__(self, delay_s: float = 0.0, fail_at: int = -1):
        self.delay_s, self.fail_at, self.received, self.closed = delay_s, fail_at, [], False

    def broadcast(self, flat, deadline):
        transport = self

        class Pending:
            def wait(self, deadline):
                if len(transport.received) == transport.fail_at:
                    raise LinkError("cut")
                time.sleep(transport.delay_s)
                transport.received.append(flat.clone())

        return Pending()

    def close(self):
        self.closed = True


def target(engine: int, verify: bool = True, connect: bool = False) -> Target:
    return Target(SyncRequest("run", engine, 1, (0, 1), 0, f"link/{engine}", connect, "127.0.0.1", 1, {}, 2, "gloo",
                              verify, 5.0), workers=2)


@pytest.fixture
def stage(model):
    trainer = FakeTrainer(model, Layout(), Layout().coord(0))
    trainer.become(weights(model, 1))
    plan = plan_sync(model_spec(read_config(model)), Layout(), 60_000, "float32", te=False)
    assert len(plan.buckets) > 4
    return StageBuckets(list(plan.buckets), trainer.params, None, sender=True, buffers=2)


def test_experts_gathered_from_other_ranks_are_refused():
    spec = model_spec({
        "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 1, "hidden_size": 24, "intermediate_size": 40,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 67, "rms_norm_eps": 1e-6, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 28,
    })
    layout = Layout(dp=2, ep=2)
    params = {param.name: torch.zeros(param.shape) for param in local_params(spec, layout, layout.coord(0), te=False)}
    plan = plan_sync(spec, layout, 60_000, "float32", te=False)
    with pytest.raises(ValueError, match="buckets of stage 0 are gathered from 1 ranks, experts' from 2"):
        StageBuckets(list(plan.buckets), params, None, sender=True, buffers=2)


def ready_links(targets, **transports) -> Links:
    store = dist.HashStore()
    for each in targets:
        for worker in range(each.workers):
            store.set(ready_key(each.request, worker), "1")
    return Links(0, store, torch.device("cpu"), {int(name[1:]): transport for name, transport in transports.items()})


def received_tensors(stage, transport) -> dict:
    return {item.name: flat[item.offset:item.offset + item.numel].view(item.shape)
            for bucket, flat in zip(stage.buckets, transport.received) for item in bucket.items}


def test_every_link_gets_every_bucket_and_the_checksums_however_slow_it_is(stage, model):
    fast, slow = RecordingTransport(), RecordingTransport(delay_s=0.02)
    targets = [target(0), target(1)]
    sent = stream(stage, ready_links(targets, _0=fast, _1=slow), targets, timeout_s=10)
    assert sent.errors == {}
    expected = weights(model, 1)
    sums = [checksum(expected[item.name], whole(item.shape)) for bucket in stage.buckets for item in bucket.items]
    for transport in (fast, slow):
        got = received_tensors(stage, transport)
        assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in got)
        assert transport.received[-1].tolist() == sums


def test_checksums_go_only_to_links_that_verify(stage):
    first, second = RecordingTransport(), RecordingTransport()
    targets = [target(0, verify=False), target(1)]
    stream(stage, ready_links(targets, _0=first, _1=second), targets, timeout_s=10)
    assert (len(first.received), len(second.received)) == (len(stage.buckets), len(stage.buckets) + 1)


@pytest.mark.parametrize("fail_at", [0, 2])
def test_a_broken_link_is_dropped_and_the_others_go_on(stage, fail_at):
    good, bad = RecordingTransport(), RecordingTransport(fail_at=fail_at)
    targets = [target(0), target(1)]
    links = ready_links(targets, _0=good, _1=bad)
    sent = stream(stage, links, targets, timeout_s=10)
    assert sent.errors == {1: "cut"} and bad.closed and list(links.open) == [0]
    assert len(good.received) == len(stage.buckets) + 1 and len(bad.received) == fail_at


def test_engines_that_refuse_or_never_come_are_left_out(stage):
    good = RecordingTransport()
    targets = [target(0), target(1, connect=True), target(2, connect=True)]
    links = ready_links(targets[:1], _0=good)
    links.store.set(failed_key("link/1"), "1")
    began = time.monotonic()
    sent = stream(stage, links, targets, timeout_s=1.0)
    assert 0.5 <= time.monotonic() - began < 2
    assert sent.errors == {1: "the engine refused the sync", 2: "the engine was not ready within 0.5 s"}
    assert len(good.received) == len(stage.buckets) + 1


def test_a_crash_of_the_sender_reaches_the_caller(stage, monkeypatch):
    monkeypatch.setattr(Links, "broadcast", lambda *_, **__: 1 / 0)
    result = []

    def run():
        with pytest.raises(ZeroDivisionError):
            stream(stage, ready_links([target(0)], _0=RecordingTransport()), [target(0)], timeout_s=10)
        result.append("raised")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(10)
    assert result == ["raised"], "the main thread waits for a buffer for ever"


def test_views_follow_parameters_that_have_moved(stage):
    assert stage.current(stage.params)
    moved = {name: tensor.clone() for name, tensor in stage.params.items()}
    assert not stage.current(moved)
