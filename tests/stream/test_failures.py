"""Senders, workers and buckets that go wrong half way, under every strategy: who notices, and that the next push heals.

One rank pushes to two toy engines of two workers each, over real gloo.
"""
import logging
import threading
import time

import pytest
import torch

from mrl.engine.api import EngineClosed, GenerateRequest, Version
from mrl.receiver.mrl_receiver.gloo import GlooTransport
from mrl.receiver.mrl_receiver.routes import Routes
from mrl.reshard.layout import Layout
from mrl.reshard.params import hf_tensors
from mrl.reshard.spec import model_spec, read_config
from mrl.stream.links import Links
from mrl.stream.sync import WeightSync
from tests.stream.engines import RUN_ID
from tests.stream.tiny import PROMPT, FakeTrainer, make_experiment, weights
from tests.stream.toys import ToyEngine, ToyModel, going_half_way, hurried

WORKERS, ENGINES, TIMEOUT_S = 2, 2, 200.0
SOME_WAY = 3  # messages that get through before something breaks
REPLICATED = "model.layers.1.mlp.up_proj.weight"


class Gang:
    """One rank and its engines."""

    def __init__(self, model, strategy: str, replicated: str = ""):
        spec = model_spec(read_config(model))
        shapes = dict(hf_tensors(spec))
        experiment = make_experiment(
            model, "python", sync={"timeout_s": TIMEOUT_S, "strategy": strategy, "verify_every": 1, "bucket_mb": 0.05},
            rollout={"parallel": {"tp": WORKERS}}, cluster={"rollout_gpus": ENGINES * WORKERS})
        self.model, self.trainer = model, FakeTrainer(model, Layout(), Layout().coord(0))
        self.engines = [ToyEngine(experiment, index, lambda worker, workers: ToyModel(
            shapes, spec.kv_heads, worker, workers, replicated), WORKERS) for index in range(ENGINES)]
        self.sync = WeightSync(experiment, self.trainer, self.engines, RUN_ID)

    def push(self, step: int):
        self.trainer.become(weights(self.model, step))
        began = time.monotonic()
        report = self.sync.push(Version(0, step))
        self.push_s = time.monotonic() - began
        return report

    def assert_heals(self, step: int) -> None:
        """The next push brings every engine to its version, all of it."""
        for engine in self.engines:
            engine.scramble()
        report = self.push(step)
        assert report.ok and report.verified, report
        for engine in self.engines:
            assert engine.holds(weights(self.model, step))

    def assert_refuses(self, index: int, words: str) -> None:
        with pytest.raises(EngineClosed, match=words):
            self.engines[index].generate.remote(GenerateRequest(PROMPT, 1, 2, 1.0)).future().result(TIMEOUT_S)

    def stop(self) -> None:
        self.sync.close()
        for engine in self.engines:
            engine.stop()


@pytest.fixture(params=["broadcast", "multi_sender", "sharded"])
def strategy(request):
    return request.param


@pytest.fixture
def gang(model, one_rank, strategy):
    gang = Gang(model, strategy)
    assert gang.push(1).ok
    yield gang
    gang.stop()


def test_a_sender_that_goes_half_way_leaves_engines_refusing(gang, monkeypatch):
    start, calls = Links.start, []

    def start_some(links, *arguments):
        calls.append(1)
        if len(calls) == SOME_WAY:
            links.close()
        return start(links, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Links, "start", start_some)
        began = time.monotonic()
        report = gang.push(2)
    assert time.monotonic() - began < TIMEOUT_S / 2, "only the deadline ended it"
    assert all("LinkError" in report.errors[index] for index in range(ENGINES)), report
    for index in range(ENGINES):
        gang.assert_refuses(index, "dirty: version 0:2 was not received whole")
    gang.assert_heals(2)


def test_a_worker_that_goes_half_way_costs_its_engine_alone(gang, monkeypatch):
    with going_half_way(monkeypatch, gang.engines[1].receivers[1]):
        began = time.monotonic()
        report = gang.push(2)
    assert time.monotonic() - began < TIMEOUT_S / 2, "only the deadline ended it"
    assert report.errors[0] is None and "the worker has died" in report.errors[1]
    assert gang.engines[0].holds(weights(gang.model, 2))
    gang.assert_refuses(1, "dirty: version 0:2 was not received whole")
    gang.assert_heals(3)


def test_a_corrupted_bucket_is_found(gang, monkeypatch):
    calls = []

    def corrupting(method):
        original = getattr(GlooTransport, method)

        def send(transport, flat, *arguments):
            calls.append(1)
            if len(calls) == SOME_WAY:
                flat = flat.clone()
                flat.view(torch.uint8)[flat.nbytes // 2] ^= 1
            return original(transport, flat, *arguments)

        return send

    with monkeypatch.context() as patch:
        for transport in _senders_ends(gang.sync.links):
            for method in ("broadcast", "send"):
                patch.setattr(transport, method, corrupting(method).__get__(transport))
        report = gang.push(2)
    failed = [index for index, error in report.errors.items() if error]
    assert len(failed) == 1 and "verification failed" in report.errors[failed[0]], report
    gang.assert_refuses(*failed, "verification failed")
    gang.assert_heals(3)


def _senders_ends(links: Links) -> list[GlooTransport]:
    return [transport for link in links.open.values() for transport in (link.p2p, link.broadcasts) if transport]


def test_an_engine_that_stops_reading_costs_its_own_link_alone(gang, monkeypatch):
    apply, stuck, over = Routes.apply, gang.engines[1].receivers[0], threading.Event()

    def apply_some(routes, position, *given):
        if routes is stuck.prepared.routes and position == 1:
            over.wait()
        apply(routes, position, *given)

    with monkeypatch.context() as patch, hurried(gang.sync, gang.push_s):
        patch.setattr(Routes, "apply", apply_some)
        report = gang.push(2)
        over.set()
    assert report.errors[1] and report.errors[0] is None
    gang.assert_heals(3)


def test_a_tensor_that_cannot_go_as_a_shard_travels_whole_and_is_named(model, one_rank, caplog):
    gang = Gang(model, "sharded", replicated=REPLICATED)
    with caplog.at_level(logging.WARNING):
        report = gang.push(1)
    assert report.ok, report
    warnings = [record.getMessage() for record in caplog.records if "cannot take them as shards" in record.getMessage()]
    assert len(warnings) == 1 and REPLICATED in warnings[0] and "q_proj" not in warnings[0]
    assert gang.engines[0].holds(weights(model, 1)) and gang.sync.plan.options.not_sharded == {REPLICATED}
    gang.assert_heals(2)
    gang.stop()
