"""Pushes to engines without a server, one worker's Receiver each: the report, the store, and the end."""
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest
import torch

from mrl.engine.api import EngineStatus, SyncError, SyncResult, Version
from mrl.receiver.mrl_receiver.receive import Receiver
from mrl.reshard.layout import Layout
from mrl.stream.sync import PushReport, WeightSync
from tests.stream.engines import RUN_ID
from tests.stream.tiny import FakeTrainer, make_experiment, weights


class Model(torch.nn.Module):
    """Parameters that are the HF tensors themselves."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        super().__init__()
        self.names = {name: name.replace(".", "/") for name in tensors}
        for name, tensor in tensors.items():
            self.register_parameter(self.names[name], torch.nn.Parameter(torch.zeros_like(tensor), requires_grad=False))

    def load_weights(self, named) -> None:
        for name, tensor in named:
            self.get_parameter(self.names[name]).data.copy_(tensor)


class Engine:
    """What WeightSync sees of an actor's handle."""

    def __init__(self, index: int, tensors: dict[str, torch.Tensor]):
        self.index, self.model, self.pool = index, Model(tensors), ThreadPoolExecutor(1)
        self.receiver = Receiver(self.model, self.model.load_weights, RUN_ID, index, 1, 0, 1)
        self.state, self.unreachable, self.refusing = "serving", False, False
        self.status, self.receive = Method(self.pool, self._status), Method(self.pool, self._receive)

    def _status(self) -> EngineStatus:
        if self.unreachable:
            raise RuntimeError("the actor has died")
        return EngineStatus(self.index, 1, self.state, None, 0, None, 1)

    def _receive(self, request) -> SyncResult:
        if self.refusing:
            raise SyncError("not today")
        if request.plan:
            self.receiver.prepare(request)
        reply = self.receiver.receive(request)
        return SyncResult(request.verify, 0.0, reply["receive_s"], reply["apply_s"])

    def holds(self, tensors: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(self.model.get_parameter(self.model.names[name]), tensor)
                   for name, tensor in tensors.items())


class Method:
    """method.remote(…).future(), as of an actor."""

    def __init__(self, pool: ThreadPoolExecutor, call):
        self.pool, self.call = pool, call

    def remote(self, *arguments):
        future = self.pool.submit(self.call, *arguments)
        return type("Reference", (), {"future": lambda self: future})()


@pytest.fixture
def fleet(model, one_rank):
    """(push(step) -> report, engines, sync) of a one-rank gang and three engines; the model has no directory here."""
    trainer = FakeTrainer(model, Layout(), Layout().coord(0))
    engines = [Engine(index, weights(model, 0)) for index in range(3)]
    config = make_experiment(model, "python", sync={"timeout_s": 10})
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": "owner/of-the-hub"})})
    sync = WeightSync(config, trainer, engines, RUN_ID)

    def push(step: int) -> PushReport:
        trainer.become(weights(model, step))
        return sync.push(Version(0, step))

    yield push, engines, sync
    sync.close()
    for engine in engines:
        engine.pool.shutdown()


def test_engines_that_are_not_up_are_absent_and_those_that_fail_are_errors(fleet, model):
    push, engines, _ = fleet
    engines[0].state, engines[1].unreachable, engines[2].refusing = "starting", True, True
    report = push(1)
    assert report.absent == {0: "engine 0 is starting", 1: "engine 1 does not answer: the actor has died"}
    assert report.errors.keys() == {2} and "not today" in report.errors[2] and not report.ok
    engines[2].refusing = False
    report = push(2)
    assert report.errors == {2: None} and report.absent.keys() == {0, 1} and not report.ok
    assert engines[2].holds(weights(model, 2))
    engines[0].state, engines[1].unreachable = "dirty", False
    report = push(3)
    assert report.ok and all(engine.holds(weights(model, 3)) for engine in engines)


def test_a_report_survives_json():
    report = PushReport("0:1", 1.0, 0.5, 0.25, 0.125, 8, {0: None, 2: "lost"}, {1: "starting"}, True, ("norm",))
    assert PushReport.from_json(json.dumps(asdict(report))) == report


def test_the_store_does_not_grow(fleet):
    push, engines, sync = fleet
    counts = []
    for step in range(1, 8):
        engines[1].state = "starting" if step == 4 else "serving"
        push(step)
        counts.append(sync.store.num_keys())
    assert counts[-1] <= counts[0], counts


def test_close_may_be_called_in_any_state(fleet):
    push, engines, sync = fleet
    sync.close()  # before any push
    assert push(1).ok
    engines[0].refusing = True
    push(2)
    sync.close()
    sync.close()
    assert not sync.links.open
