"""RolloutService with real Ray actors that stand in for workers and gates."""
from __future__ import annotations

import os

import pytest
import ray

from mrl.engine.api import EngineStatus, Version
from mrl.rollout.service import RolloutService
from mrl.rollout.types import GroupRequest
from tests.rollout.experiments import experiment
from tests.rollout.groups import group

V0, V1 = Version(0, 0), Version(0, 1)


class Worker:
    """Finishes every group at once; `die_after` groups asked for, its process ends (once)."""

    def __init__(self, scratch: str, die_after: int | None):
        self.scratch, self.die_after, self.done, self.prepared = scratch, die_after, [], False

    def prepare(self, kinds):
        self.prepared = True

    def sizes(self):
        return {"": 5, "easy": 2, "hard": 1}

    def cancel(self):
        self.done = []

    def ask(self, requests: list[GroupRequest], version: Version):
        with open(self.scratch, "a") as file:
            file.write(f"{[r.group_id for r in requests]} {version} {self.prepared}\n")
        for request in requests:
            self.done.append(group(request.group_id, [1, 0], version=version))
            self.done[-1].request = request

    def collect(self, timeout_s):
        if self.die_after is not None and not os.path.exists(self.scratch + ".died"):
            open(self.scratch + ".died", "w").close()
            os._exit(1)
        done, self.done = self.done, []
        return done


class Gate:
    def __init__(self, index: int, state: str, version: Version | None):
        self.status_now = EngineStatus(index, 1, state, version, 0, None, 1)

    def status(self):
        return self.status_now

    def abort(self, attempt):
        return 0

    def die(self):
        os._exit(1)


@pytest.fixture(scope="module", autouse=True)
def ray_here():
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture
def make(tmp_path):
    def build(gates=(("serving", V0),), workers=1, die_after=None):
        actor, gate = ray.remote(num_cpus=0, max_restarts=-1)(Worker), ray.remote(num_cpus=0)(Gate)
        made = [actor.remote(str(tmp_path / f"worker{i}"), die_after if i == 0 else None) for i in range(workers)]
        engines = [gate.remote(i, state, version) for i, (state, version) in enumerate(gates)]
        datasets = {"easy": {"path": "e.jsonl"}, "hard": {"path": "h.jsonl", "samples_per_prompt": 8}}
        return RolloutService(experiment(eval={"datasets": datasets}), made, engines)
    return build


def beat():
    pass


def test_groups_come_back_in_order_from_all_workers_and_ids_run_on(make):
    service = make(workers=2)
    service.ask_training(0, V0)
    service.ask_training(1, V0)
    service.ask_evaluation(V0)
    assert service.wait(beat) == []
    assert [g.request.group_id for g in service.take("train")] == [0, 1, 2, 3]
    evaluated = [g.request for g in service.take("eval")]
    assert [(r.group_id, r.prompt_index, r.dataset, r.samples) for r in evaluated] == [
        (0, 0, "easy", 1), (1, 1, "easy", 1), (2, 0, "hard", 8)]
    assert service.take("train") == []


def test_a_resumed_service_goes_on_where_the_first_stopped(make):
    service = make()
    service.ask_training(0, V0)
    state = service.state()
    again = make()
    again.restore(state)
    again.ask_training(1, V0)
    again.wait(beat)
    assert [g.request.group_id for g in again.take("train")] == [2, 3]


def test_a_worker_that_dies_is_made_ready_and_asked_again(make, tmp_path):
    service = make(die_after=1)
    service.ask_training(0, V0)
    assert service.wait(beat) == []
    assert [g.request.group_id for g in service.take("train")] == [0, 1]
    assert (tmp_path / "worker0").read_text().splitlines() == ["[0, 1] 0:0 False", "[0, 1] 0:0 True"]


def test_engines_without_the_last_push_are_named(make):
    service = make(gates=[("serving", V0), ("dirty", None), ("starting", None), ("serving", V1), ("failed", None)])
    service.served = V1
    service.missing[0]["train", 99] = (None, V0)
    assert service.wait(beat) == [0, 1]
    assert service.without(V1) == [0, 1, 2, 4]


def test_without_any_engine_the_wait_ends(make):
    service = make(gates=[("failed", None), ("serving", V0)])
    service.missing[0]["train", 99] = (None, V0)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(service.engines[1].die.remote())
    with pytest.raises(RuntimeError, match="no engine is left"):
        service.wait(beat)


def test_only_an_engine_that_keeps_refusing_ends_the_run(make):
    service = make()
    for _ in range(5):
        service.pushed(V0, {0: "broken"})
        service.pushed(V1, {0: None})
    service.pushed(V0, {0: "broken"})
    service.pushed(V0, {0: "broken"})
    with pytest.raises(RuntimeError, match="engine 0 refused the weights 3 times: broken"):
        service.pushed(V0, {0: "broken"})
