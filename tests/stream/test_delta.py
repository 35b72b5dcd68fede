"""Pushes of what has changed, under every strategy: bit for bit a full push, and full whenever it has to be.

One rank pushes to two toy engines of two workers each, over real gloo. Every buffer turns to garbage as soon as it may
be used again.
"""
import time

import pytest
import torch

from mrl.engine.api import Version
from mrl.reshard.layout import Layout
from mrl.reshard.params import hf_tensors
from mrl.reshard.spec import model_spec, read_config
from mrl.stream.links import Links
from mrl.stream.sync import WeightSync
from tests.receiver.poison import poison_transport
from tests.stream.engines import RUN_ID, STRATEGIES
from tests.stream.tiny import FakeTrainer, make_experiment, weights
from tests.stream.toys import ToyEngine, ToyModel, going_half_way, hurried

WORKERS, ENGINES = 2, 2
FULL = pytest.approx(1.0, abs=0.01)  # every slice has its header, too
HALF = 0.4  # when one of the two engines gets everything, and the other one buckets of its own
FEW = 0.01  # of the elements change: ten times as many bytes would be too many


class Gang:
    """One rank and its engines. `tensors`: the trainer's weights."""

    def __init__(self, model, strategy: str):
        spec = model_spec(read_config(model))
        shapes = dict(hf_tensors(spec))
        experiment = make_experiment(
            model, "python", rollout={"parallel": {"tp": WORKERS}}, cluster={"rollout_gpus": ENGINES * WORKERS},
            sync={"timeout_s": 300, "strategy": strategy, "delta": True, "bucket_mb": 0.05})
        self.model, self.trainer, self.tensors = model, FakeTrainer(model, Layout(), Layout().coord(0)), {}
        self.engines = [ToyEngine(experiment, index, lambda worker, workers: ToyModel(
            shapes, spec.kv_heads, worker, workers), WORKERS) for index in range(ENGINES)]
        self.sync = WeightSync(experiment, self.trainer, self.engines, RUN_ID)
        self.step = 0

    def change(self, fraction: float) -> None:
        """Other values in about this fraction of every tensor; NaN, infinity and the zeros among them."""
        self.step += 1
        for name, new in weights(self.model, self.step).items():
            chosen = torch.rand(new.shape) < fraction
            new.view(-1)[:4] = torch.tensor([float("nan"), -0.0, 0.0, float("inf")]).roll(self.step)
            self.tensors[name] = torch.where(chosen, new, self.tensors.get(name, new))
        self.trainer.become(self.tensors)

    def push(self, fraction: float, engines: list[int] | None = None):
        self.change(fraction)
        began = time.monotonic()
        report = self.sync.push(Version(0, self.step), engines)
        self.push_s = time.monotonic() - began
        return report

    def assert_holds(self, *engines: int) -> None:
        """These engines hold the trainer's weights, to the last bit; every one when none is named."""
        for index in engines or range(ENGINES):
            assert self.engines[index].holds(self.tensors), f"engine {index}"

    def stop(self) -> None:
        self.sync.close()
        for engine in self.engines:
            engine.stop()


@pytest.fixture(params=STRATEGIES)
def gang(model, one_rank, request, monkeypatch):
    poison_transport(monkeypatch, "gloo")
    torch.manual_seed(1)
    gang = Gang(model, request.param)
    report = gang.push(1.0)
    assert report.ok and report.verified and report.sent_fraction == FULL, report
    yield gang
    gang.stop()


def test_few_changes_are_few_bytes_and_many_are_a_full_push(gang):
    for verified in (True, False):  # the first of changes, and the next
        report = gang.push(FEW)
        assert report.ok and report.verified is verified and report.sent_fraction < 10 * FEW, report
        gang.assert_holds()
    report = gang.sync.push(Version(0, gang.step + 1))
    gang.step += 1
    assert report.ok and report.sent_fraction < FEW, "nothing has changed"
    gang.assert_holds()
    report = gang.push(1.0)
    assert report.ok and report.sent_fraction == FULL, report
    gang.assert_holds()
    report = gang.push(0.3)
    assert report.ok and 0.25 < report.sent_fraction < 0.5, report
    gang.assert_holds()
    kept = sum(one.nbytes for bucket in gang.sync.plan.outline for one in bucket.slices)
    assert gang.sync.bases.nbytes == kept


def test_an_engine_that_missed_a_push_gets_all_that_was_sent_to_others_meanwhile(gang):
    report = gang.push(FEW, [0])
    assert report.ok and report.sent_fraction < 10 * FEW
    gang.assert_holds(0)
    report = gang.push(FEW)
    shared = any(len(bucket.engines) > 1 for bucket in gang.sync.plan.outline)
    assert report.ok and (report.sent_fraction == FULL if shared else report.sent_fraction < 10 * FEW), report
    assert shared == (gang.sync.plan.strategy == "broadcast")
    gang.assert_holds()
    report = gang.push(FEW)
    assert report.ok and report.sent_fraction < 10 * FEW
    gang.assert_holds()


def test_an_engine_that_was_restarted_gets_everything(gang):
    for receiver in gang.engines[1].receivers:
        receiver.close()
    gang.engines[1].submit("_launch").result(300)
    report = gang.push(FEW)
    assert report.ok and report.verified and report.sent_fraction > HALF, report
    gang.assert_holds()
    assert gang.push(FEW).sent_fraction < 10 * FEW
    gang.assert_holds()


def test_a_push_that_broke_half_way_is_followed_by_a_full_one(gang, monkeypatch):
    with going_half_way(monkeypatch, gang.engines[1].receivers[1]):
        report = gang.push(FEW)
    assert report.errors[0] is None and "the worker has died" in report.errors[1]
    assert gang.engines[1].status.remote().future().result().state == "dirty"
    report = gang.push(FEW)
    assert report.ok and report.sent_fraction > HALF, report
    gang.assert_holds()


def test_a_message_that_was_corrupted_is_found_and_followed_by_a_full_push(gang, monkeypatch):
    start, spoiled = Links.start, []

    def start_spoiled(links, engines, flat, *arguments):
        if flat.dtype == torch.uint8 and not spoiled:  # a delta's payload
            spoiled.append(flat)
            flat[-1] ^= 64  # its last new value
        return start(links, engines, flat, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Links, "start", start_spoiled)
        report = gang.push(FEW)
    assert spoiled and any("verification failed" in (error or "") for error in report.errors.values()), report
    report = gang.push(FEW)
    assert report.ok and report.sent_fraction > HALF, report
    gang.assert_holds()


def test_a_worker_that_holds_another_push_refuses_before_anything_has_changed(gang):
    gang.engines[0].receivers[0].held = 77
    with hurried(gang.sync, gang.push_s):  # the others wait for the one that refused, as for any that does not join
        report = gang.push(FEW)
    assert "push 77 is in place" in report.errors[0] and report.errors[1] is None
    gang.assert_holds(1)
    report = gang.push(FEW)
    assert report.ok, report
    gang.assert_holds()
