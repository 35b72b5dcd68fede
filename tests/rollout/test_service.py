"""RolloutService with real Ray actors that stand in for workers and gates."""
from __future__ import annotations

import asyncio
import json
import os
import time

import pytest
import ray

from mrl.engine.api import EngineStatus, GenerateRequest, Version
from mrl.rollout.router import Router
from mrl.rollout.service import RolloutService
from mrl.rollout.types import GroupRequest
from tests.rollout.experiments import experiment
from tests.rollout.groups import group
from tests.some_ray import some_ray

V0, V1 = Version(0, 0), Version(0, 1)


class Worker:
    """Finishes every group at once, with the rewards of `outcomes` by group id (else 1 and 0); a group id in `stuck` is
    never finished. `die_after` groups asked for, its process ends (once)."""

    def __init__(self, scratch: str, die_after: int | None, outcomes: dict[int, list[float]], stuck: set[int]):
        self.scratch, self.die_after, self.done, self.prepared = scratch, die_after, [], False
        self.outcomes, self.stuck = outcomes, stuck

    def prepare(self, kinds):
        self.prepared = True

    def sizes(self):
        return {"": 5, "easy": 2, "hard": 1}

    def cancel(self):
        self.done = []

    def note(self, text):
        with open(self.scratch, "a") as file:
            file.write(text + "\n")

    def ask(self, requests: list[GroupRequest], version: Version):
        self.note(f"{[r.group_id for r in requests]} {version} {self.prepared}")
        for request in requests:
            rewards = self.outcomes.get(request.group_id, [1, 0]) if request.kind == "train" else [1]
            made = group(request.group_id, rewards, version=version, dataset=request.dataset)
            made.request = request
            self.done += [] if request.kind == "train" and request.group_id in self.stuck else [made]

    def drop(self, requests: list[GroupRequest]):
        self.note(f"drop {[r.group_id for r in requests]}")
        self.done = [made for made in self.done if made.request not in requests]

    def collect(self, timeout_s):
        if self.die_after is not None and not os.path.exists(self.scratch + ".died"):
            open(self.scratch + ".died", "w").close()
            os._exit(1)
        if not self.done:
            time.sleep(0.05)
        done, self.done = self.done, []
        return done


class Gate:
    def __init__(self, index: int, state: str, version: Version | None):
        self.status_now = EngineStatus(index, 1, state, version, 0, None, 1)
        self.told = []

    def status(self):
        return self.status_now

    def abort(self, attempt):
        return 0

    def sleep(self):
        self.told.append("sleep")

    def wake(self, part):
        self.told.append(part)

    def heard(self):
        return self.told

    def die(self):
        os._exit(1)


@pytest.fixture(scope="module", autouse=True)
def ray_here():
    with some_ray():
        yield


@pytest.fixture(scope="module")
def serving_gate(ray_here):
    return ray.remote(num_cpus=0)(Gate).remote(0, "serving", V0)


@pytest.fixture
def make(tmp_path, serving_gate):
    made = []

    def build(gates=None, workers=1, die_after=None, outcomes=None, stuck=(), after=None, **sections):
        """gates: (state, version) of each engine; None: one that serves V0. after: an earlier service, whose actors
        this one takes over, as when the trainers are restarted."""
        if after:
            after.close()
            made.append(RolloutService(experiment(**sections), after.workers, after.engines, attempt=1))
            return made[-1]
        actor, gate = ray.remote(num_cpus=0, max_restarts=-1)(Worker), ray.remote(num_cpus=0)(Gate)
        actors = [actor.remote(str(tmp_path / f"worker{i}"), die_after if i == 0 else None, outcomes or {}, set(stuck))
                  for i in range(workers)]
        engines = [gate.remote(i, *of) for i, of in enumerate(gates)] if gates else [serving_gate]
        datasets = {"easy": {"path": "e.jsonl"}, "hard": {"path": "h.jsonl", "samples_per_prompt": 8}}
        made.append(RolloutService(experiment(eval={"datasets": datasets}, **sections), actors, engines))
        return made[-1]

    yield build
    for service in made:
        service.close()


def beat():
    pass


def ids(groups):
    return [group.request.group_id for group in groups]


def log(tmp_path, worker=0):
    return (tmp_path / f"worker{worker}").read_text().splitlines()


def next_batch(service, step, version=V0):
    service.ask_training(step, version)
    assert service.wait(beat) == []
    return ids(service.take("train"))


def test_groups_come_back_in_order_from_all_workers_and_ids_run_on(make):
    service = make(workers=2)
    service.ask_evaluation(V0)
    assert next_batch(service, 0) == [0, 1]
    evaluated = [group.request for group in service.take("eval")]
    assert [(r.group_id, r.prompt_index, r.dataset, r.samples) for r in evaluated] == [
        (0, 0, "easy", 1), (1, 1, "easy", 1), (2, 0, "hard", 8)]
    assert service.take("train") == []
    assert next_batch(service, 1) == [2, 3]


def test_a_resumed_service_goes_on_where_the_first_stopped(make):
    service = make()
    next_batch(service, 0)
    state = service.state()
    service.ask_training(1, V0)  # in flight at the end: asked for again
    again = make(after=service)
    again.restore(state)
    assert next_batch(again, 1) == [2, 3]


def test_a_worker_that_dies_is_made_ready_and_asked_again(make, tmp_path):
    service = make(die_after=1)
    assert next_batch(service, 0) == [0, 1]
    assert log(tmp_path) == ["[0, 1] 0:0 False", "[0, 1] 0:0 True"]


FILTERED = {"filters": {"zero_variance": True}}
MIXED, SAME = [1, 0], [1, 1]


def test_rejected_groups_are_replaced_while_nobody_waits(make, tmp_path):
    service = make(outcomes={0: SAME, 2: SAME}, rollout=FILTERED)
    service.ask_training(0, V0)
    service.intake.join(300)  # as when rank 0 is busy training
    assert log(tmp_path) == ["[0, 1] 0:0 False", "[2] 0:0 False", "[3] 0:0 False"]
    assert service.wait(beat) == [] and ids(service.take("train")) == [1, 3]
    assert service.batch_metrics["filters/zero_variance"] == 2 and service.batch_metrics["filters/refills"] == 2
    assert next_batch(service, 1, V1) == [4, 5]
    assert service.batch_metrics["filters/refills"] == 0


def test_a_resume_neither_loses_nor_doubles_prompts_that_refills_took(make):
    outcomes = {number: SAME for number in (0, 2, 5, 6)}
    service = make(outcomes=outcomes, rollout=FILTERED)
    assert [next_batch(service, step) for step in range(2)] == [[1, 3], [4, 7]]
    state, metrics = json.loads(json.dumps(service.state())), service.batch_metrics
    assert next_batch(service, 2) == [8, 9]
    again = make(after=service, rollout=FILTERED)
    again.restore(state)
    assert again.batch_metrics == metrics != {}  # they belong to the batch that waits in the checkpoint
    assert next_batch(again, 2) == [8, 9]


def test_what_was_drawn_to_spare_is_dropped_and_drawn_again(make, tmp_path):
    service = make(outcomes={0: SAME}, stuck={3, 4}, rollout={**FILTERED, "oversample": 2})
    assert next_batch(service, 0) == [1, 2]  # 3 is needed no longer, nor is 4, its group's replacement
    assert log(tmp_path) == ["[0, 1, 2, 3] 0:0 False", "drop [3]"] or log(tmp_path) == [
        "[0, 1, 2, 3] 0:0 False", "[4] 0:0 False", "drop [3, 4]"]
    assert service.batch_metrics["filters/prompts_not_needed"] in (1, 2) and not any(service.missing)
    service.ask_training(1, V1)
    assert log(tmp_path)[-1] == "[3, 4, 5, 6] 0:1 False"


def test_a_dropped_group_that_was_on_its_way_is_not_taken_for_its_successor(make):
    service = make(stuck={0, 1})
    service.ask_training(1, V1)
    stale = group(0, MIXED)  # of the same prompt, for step 0
    service._receive(0, stale)
    assert service.draw.kept == {} and len(service.missing[0]) == 2


def test_the_limit_trains_on_what_there_is_or_ends_the_run(make):
    outcomes = {number: SAME for number in range(1, 20)}
    limit = {"max_gen_batches": 2}
    service = make(outcomes=outcomes, rollout={**FILTERED, "dynamic_sampling": limit})
    assert next_batch(service, 0) == [0] and service.batch_metrics["filters/groups_missing"] == 1
    assert next_batch(service, 1) == [] and service.batch_metrics["filters/groups_missing"] == 2
    assert service.order.position == 8
    service = make(after=service, rollout={**FILTERED, "dynamic_sampling": {**limit, "at_limit": "error"}})
    service.ask_training(0, V0)
    with pytest.raises(RuntimeError, match="of the 4 prompts of step 0, rollout.filters kept 1 groups where a batch "
                                           "needs 2: raise rollout.dynamic_sampling.max_gen_batches"):
        service.wait(beat)


def test_a_worker_that_dies_loses_no_refill(make):
    service = make(workers=2, die_after=1, outcomes={0: SAME, 1: SAME, 2: SAME}, rollout=FILTERED)
    assert next_batch(service, 0) == [3, 4]


def test_mastered_prompts_are_passed_over(make):
    """5 rows; all groups are right, so that from the second epoch on few prompts are worth drawing."""
    service = make(outcomes={number: SAME for number in range(1000)},
                   rollout={"priority": {"by": "failure", "floor": 0.1}})
    batches = [next_batch(service, step) for step in range(6)]
    assert batches[:2] == [[0, 1], [2, 3]] and batches[2][0] == 4
    assert service.order.position > 30 and service.batch_metrics["filters/prompts_passed_over"] >= 0


class Endless:
    """A gate whose requests never finish."""

    def __init__(self):
        self.running, self.cancelled = 0, 0

    async def generate(self, request):
        self.running += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def counts(self):
        return self.running, self.cancelled


def test_a_request_that_is_given_up_ends_in_the_engine():
    gate = ray.remote(num_cpus=0, max_concurrency=10)(Endless).remote()

    async def until(counts):
        while await gate.counts.remote() != counts:
            await asyncio.sleep(0.05)

    async def give_up():
        request = GenerateRequest([1], seed=0, max_tokens=5, temperature=1.0)
        task = asyncio.create_task(Router([gate], deadline_s=60).generate(request))
        await until((1, 0))
        task.cancel()
        await until((1, 1))
    asyncio.run(asyncio.wait_for(give_up(), 300))


def test_engines_without_the_last_push_are_named(make):
    service = make(gates=[("serving", V0), ("dirty", None), ("starting", None), ("serving", V1), ("failed", None),
                          ("asleep", None)], stuck={0})
    service.served = V1
    service.ask_training(0, V1)
    assert service.wait(beat) == [0, 1, 5]
    assert service.without(V1) == [0, 1, 2, 4, 5]


def test_all_engines_are_told_to_sleep_and_to_wake_but_those_whose_gates_have_died(make):
    service = make(gates=[("asleep", None), ("serving", V0), ("serving", V0)])
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(service.engines[1].die.remote())
    service.sleep()
    service.wake("weights")
    service.wake("kv_cache")
    assert ray.get([service.engines[i].heard.remote() for i in (0, 2)]) == [["sleep", "weights", "kv_cache"]] * 2


def test_without_any_engine_the_wait_ends(make):
    service = make(gates=[("failed", None), ("serving", V0)], stuck={0})
    service.ask_training(0, V0)
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
