"""Pushes to engines without a server: the report, the store, and the end."""
import time
from dataclasses import replace

import pytest

from mrl.engine.api import Version
from mrl.reshard.layout import Layout
from mrl.reshard.params import hf_tensors
from mrl.reshard.spec import model_spec, read_config
from mrl.stream.report import PushReport, Sent
from mrl.stream.sync import WeightSync
from tests.stream.engines import RUN_ID
from tests.stream.tiny import FakeTrainer, make_experiment, weights
from tests.stream.toys import ToyEngine, ToyModel


@pytest.fixture
def fleet(model, one_rank):
    """(push(step) -> report, engines, sync) of a one-rank gang and three engines; the model has no directory here."""
    spec = model_spec(read_config(model))
    shapes = dict(hf_tensors(spec))
    trainer = FakeTrainer(model, Layout(), Layout().coord(0))
    config = make_experiment(model, "python", sync={"timeout_s": 300}, cluster={"rollout_gpus": 3})
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": "owner/of-the-hub"})})
    engines = [ToyEngine(config, index, lambda worker, workers: ToyModel(shapes, spec.kv_heads, worker, workers), 1)
               for index in range(3)]
    sync = WeightSync(config, trainer, engines, RUN_ID)

    def push(step: int) -> PushReport:
        trainer.become(weights(model, step))
        return sync.push(Version(0, step))

    yield push, engines, sync
    sync.close()
    for engine in engines:
        engine.stop()


def test_engines_that_are_not_up_are_absent_and_those_that_fail_are_errors(fleet, model):
    push, engines, _ = fleet
    engines[0].gate._state = "starting"
    engines[1].failing["status"] = "the actor has died"
    engines[2].failing["prepare"] = "not today"
    report = push(1)
    assert report.absent == {0: "engine 0 is starting", 1: "engine 1 does not answer: the actor has died"}
    assert report.errors == {2: "not today"} and not report.ok
    engines[2].failing = {"receive": "nor now"}
    assert "nor now" in push(2).errors[2]
    engines[2].failing = {}
    report = push(3)
    assert report.errors == {2: None} and report.absent.keys() == {0, 1} and not report.ok
    assert engines[2].holds(weights(model, 3)) and not engines[1].holds(weights(model, 3))
    engines[0].gate._state = "dirty"
    engines[1].failing = {}
    report = push(4)
    assert report.ok and all(engine.holds(weights(model, 4)) for engine in engines)


def test_an_engine_of_another_size_than_planned_is_an_error(fleet, monkeypatch):
    push, engines, _ = fleet
    status = engines[1].status.remote().future().result()

    async def larger():
        return replace(status, world_size=2)

    monkeypatch.setattr(engines[1].gate, "status", larger)
    report = push(1)
    assert "engine 1 has 2 workers, the plan is for 1" in report.errors[1]
    assert report.errors[0] is None and report.errors[2] is None


def test_only_the_engines_named_are_pushed_to(fleet, model):
    push, engines, sync = fleet
    assert push(1).ok
    sync.trainer.become(weights(model, 2))
    report = sync.push(Version(0, 2), [1])
    assert report.errors == {1: None} and report.ok
    assert engines[1].holds(weights(model, 2)) and engines[0].holds(weights(model, 1))
    assert push(3).ok and all(engine.holds(weights(model, 3)) for engine in engines)


def test_reports_survive_json():
    report = PushReport("0:1", "sharded", 1.0, 0.5, 0.25, 0.125, 0.375, 8, 0.5, {0: None, 2: "lost"},
                        {1: "starting"}, True, ("norm",))
    assert PushReport.from_json(report.to_json()) == report
    sent = Sent(1.0, 2.0, 3, 6, {4: "lost"})
    assert Sent.from_json(sent.to_json()) == sent


def test_the_store_does_not_grow(fleet):
    push, engines, sync = fleet
    counts = []
    for step in range(1, 8):
        engines[1].gate._state = "starting" if step == 4 else "dirty"
        push(step)
        counts.append(sync.store.num_keys())
    assert counts[-1] == counts[-2] <= counts[1] + 2, counts  # gloo leaves two of its own for the link built anew


def test_an_engine_that_refuses_lets_go_of_what_had_begun(fleet, model):
    push, engines, sync = fleet
    assert push(1).ok and push(2).ok
    began = time.monotonic()
    report = push(2)  # its workers have begun to receive when the gates refuse
    assert all("0:2 is refused" in report.errors[index] for index in range(len(engines))), report
    assert time.monotonic() - began < sync.settings.timeout_s / 4, "only the deadline ended it"
    assert all(engine.gate._state == "serving" and engine.holds(weights(model, 2)) for engine in engines)
    assert push(3).ok and all(engine.holds(weights(model, 3)) for engine in engines)


def test_views_are_made_anew_when_parameters_have_moved(fleet, model):
    push, engines, sync = fleet
    assert push(1).ok
    gatherer = sync.gatherer
    assert push(2).ok and sync.gatherer is gatherer
    sync.trainer.params = {name: tensor.clone() for name, tensor in sync.trainer.params.items()}
    assert push(3).ok and sync.gatherer is not gatherer
    assert all(engine.holds(weights(model, 3)) for engine in engines)


def test_close_may_be_called_in_any_state(fleet):
    push, engines, sync = fleet
    sync.close()  # before any push
    assert push(1).ok
    engines[0].failing["receive"] = "not today"
    push(2)
    sync.close()
    sync.close()
    assert not sync.links.open
