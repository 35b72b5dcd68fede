"""The step loop with real rollout workers and dynamic sampling, around stand-ins for the trainer and the engine."""
from __future__ import annotations

import asyncio
import json
import random
import shutil
from pathlib import Path

import pytest
import ray

from mrl.cluster.checkpoints import Checkpoints
from mrl.config.schema import Checkpoint, Log
from mrl.engine.api import Completion, EngineClosed, EngineLost, EngineStatus, Version
from mrl.loop import StepLoop
from mrl.observe.clock import Clock
from mrl.observe.runlog import RunLog
from mrl.platform import get_platform
from mrl.rollout.service import RolloutService
from mrl.rollout.worker import RolloutWorker
from mrl.stream.report import PushReport
from mrl.turns import Turns
from tests.e2e.runs import rows, trajectories
from tests.rollout.experiments import experiment
from tests.some_ray import some_ray
from tests.test_learner import Scatter
from tests.test_learner import Trainer as Learning
from tools.make_quickstart import make_model, make_tokenizer

STEPS, NAME = 4, "engine of the loop's tests"
MODES = ("one_step_overlap", "colocated_sync")


class Gate:
    """Answers a + 1 after a moment: always right where a is even, half of the time where it is odd.

    It may be one that sleeps; then it dies when it is asked for the `dies_at`-th time, and comes back asleep.
    """

    def __init__(self):
        self.tokenizer = make_tokenizer()

    async def begin(self, held, dies_at):
        self.held, self.dies_at, self.asked = held, dies_at, 0
        self.state, self.version = ("serving", Version(0, 0)) if held == "kv_cache" else ("asleep", None)

    async def sleep(self):
        self.held, self.state, self.version = "nothing", "asleep", None

    async def wake(self, part):
        assert (self.held, part) in (("nothing", "weights"), ("weights", "kv_cache"))
        self.held = part
        if part == "kv_cache":
            self.state = "serving" if self.version else "dirty"

    async def holds(self):
        return self.held

    async def status(self):
        return EngineStatus(0, 1, self.state, self.version, 0, None, 1)

    async def abort(self, attempt):
        return 0

    async def serve(self, version):
        self.version = version

    async def generate(self, request):
        self.asked += 1
        if self.asked == self.dies_at:
            await self.sleep()
            raise EngineLost("dead")
        if self.state != "serving" or self.version < request.at_least:
            raise EngineClosed(self.state)
        chance = random.Random(request.seed)
        await asyncio.sleep(0.1 * chance.random())
        if self.state != "serving":
            raise EngineClosed("aborted")
        problem = self.tokenizer.decode(request.prompt_ids)
        a = int(problem.partition("+1=?")[0].split()[-1].removeprefix("user"))
        text = str(a + 1) if a % 2 == 0 or chance.random() < 0.5 else "wrong"
        ids = [*self.tokenizer.encode(text), self.tokenizer.eos_token_id]
        return Completion(ids, [-0.5] * len(ids), "stop", self.version)


class Trainer(Learning):
    def __init__(self, held, turns):
        super().__init__()
        self.held, self.turns = held, turns

    def train(self, microbatches, loss_fn):
        assert not self.turns or self.held() == "nothing"
        return {**super().train(microbatches, loss_fn), "grad_norm": 1.0, "update_skipped": 0.0}

    def save(self, directory, extra):
        assert not self.turns or self.held() == "nothing"
        directory.mkdir()
        for name, content in extra.items():
            (directory / name).write_bytes(content)

    def load(self, directory):
        pass


class Sync:
    def __init__(self, gate, turns):
        self.gate, self.turns = gate, turns

    def push(self, version, engines):
        assert not self.turns or ray.get(self.gate.holds.remote()) == "weights"
        ray.get(self.gate.serve.remote(version))
        return PushReport(str(version), "broadcast", 0.0, 0.0, 0.0, 0.0, 0.0, 1, 1.0, errors={0: None}, absent={},
                          verified=False)


class Orders:
    def exchange(self, decide, timeout_s):
        return decide(lambda: None)


def find_engines() -> list:
    return [ray.get_actor(NAME)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs the loop in a directory: run(run_dir, attempt, **sections)."""
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, seed=0)
    problems = [json.dumps({"prompt": f"{a}+1=?", "answer": str(a + 1)}) + "\n" for a in range(40)]
    (folder / "train.jsonl").write_text("".join(problems))
    common = {"model": {"path": str(folder)}, "data": {"train": str(folder / "train.jsonl")},
              "reward": {"kind": "exact"}, "batch": {"samples_per_prompt": 4}}
    with some_ray():
        gate = ray.remote(num_cpus=0, max_concurrency=100)(Gate).options(name=NAME).remote()
        worker = ray.remote(num_cpus=0, max_concurrency=100)(RolloutWorker).remote(experiment(**common), find_engines)
        ray.get(worker.prepare.remote(("train",)))

        def run_loop(run_dir: Path, attempt: int = 0, sleeps: bool = False, dies_at: int = 0, **sections) -> None:
            exp = experiment(**common, **{"loop": {"steps": STEPS}, **sections})
            ray.get(gate.begin.remote("nothing" if sleeps else "kv_cache", dies_at))
            service = RolloutService(exp, [worker], [gate], attempt, kinds=("train",))
            run_dir.mkdir(exist_ok=True)
            log = RunLog(run_dir, Log(tensorboard=False, trajectories_per_step=100), STEPS, attempt)
            clock = Clock()
            turns = Turns(get_platform("cpu"), None, sleeps, lambda: None, service, clock)
            trainer = Trainer(lambda: ray.get(gate.holds.remote()), sleeps)
            StepLoop(exp, trainer, Sync(gate, sleeps), Orders(), Scatter(),
                     Checkpoints(run_dir, Checkpoint(every=2), STEPS), service, log, attempt, turns, clock).run()
            service.close()
            log.close()

        yield run_loop


def test_engines_that_sleep_give_the_same_batches_even_when_one_dies(run, tmp_path):
    colocated = {"steps": STEPS, "mode": "colocated_sync"}
    run(tmp_path / "awake", loop=colocated)
    run(tmp_path / "asleep", loop=colocated, sleeps=True, dies_at=20)
    assert groups(tmp_path / "asleep") == groups(tmp_path / "awake")
    assert [row["sync/version"] for row in rows(tmp_path / "asleep", "sync")] == [
        "0:0", "0:1", "0:2", "0:2", "0:3", "0:4"]
    for row in rows(tmp_path / "asleep", "train"):
        named = {name.removeprefix("timing/"): value for name, value in row.items() if name.startswith("timing/")}
        assert {"sleep", "wake"} <= named.keys() and row["memory/beside_gb"] == 0
        parts = {name: value for name, value in named.items() if name not in ("step", "generate_sequences")}
        assert sum(parts.values()) == pytest.approx(named["step"], abs=1e-6)
    assert not any(name in row for row in rows(tmp_path / "awake", "train") for name in ("timing/sleep", "timing/wake"))


def groups(run_dir: Path) -> list[list[int]]:
    return [[row["group"] for row in trajectories(run_dir, f"step_{step:06d}")] for step in range(STEPS)]


def test_batches_are_full_of_the_promised_age_and_the_same_after_a_resume(run, tmp_path):
    sampling = {"filters": {"zero_variance": True}, "oversample": 2}
    for mode, lag in zip(MODES, (1.0, 0.0)):
        run(tmp_path / mode, rollout=sampling, loop={"steps": STEPS, "mode": mode})
        steps = rows(tmp_path / mode, "train")
        assert [row["rollout/version_lag"] for row in steps] == [0.0] + [lag] * (STEPS - 1)
        assert all(row["filters/groups_missing"] == row["rollout/groups_without_signal"] == 0 for row in steps)
        used = [number for batch in groups(tmp_path / mode) for number in batch]
        assert used == sorted(set(used)) and used[-1] + 1 == len(used) + sum(row["filters/refills"] for row in steps)
        assert sum(row["filters/refills"] for row in steps) > 0

        resumed = tmp_path / f"resumed {mode}"
        shutil.copytree(tmp_path / mode, resumed)
        shutil.rmtree(resumed / "checkpoints" / f"step_{STEPS:06d}")
        run(resumed, attempt=1, rollout=sampling, loop={"steps": STEPS, "mode": mode})
        assert groups(resumed) == groups(tmp_path / mode)
        metrics = [{name: value for name, value in row.items() if name.startswith("reward/")} for row in steps]
        again = rows(resumed, "train")[STEPS:]
        assert [row["step"] for row in again] == [3, 4] and all(row["attempt"] == 1 for row in again)
        for row, before in zip(again, metrics[2:]):
            assert {name: row[name] for name in before} == before
    assert groups(tmp_path / MODES[0]) == groups(tmp_path / MODES[1])


@pytest.mark.parametrize("mode", MODES)
def test_a_run_whose_filters_leave_nothing_goes_on(run, tmp_path, mode):
    run(tmp_path / mode, loop={"steps": STEPS, "mode": mode}, rollout={
        "filters": {"accuracy_min": 0.9, "accuracy_max": 0.95}, "dynamic_sampling": {"max_gen_batches": 1}})
    steps = rows(tmp_path / mode, "train")
    assert [row["filters/groups_missing"] for row in steps] == [2] * STEPS
    assert not any(name.startswith("actor/") for row in steps for name in row)
    assert [row["sync/version"] for row in rows(tmp_path / mode, "sync")] == [f"0:{step}" for step in range(STEPS + 1)]
    assert (tmp_path / mode / "progress.log").read_text().count("trained nothing: no group was left") == STEPS
