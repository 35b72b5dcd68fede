"""The quickstart with SGLang in vLLM's place, dynamic sampling and a reward of two parts, a few steps in turns, from
the same warm start.
(Overlapped steps with SGLang: test_recovery.)"""
from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.e2e.conftest import mrl
from tests.e2e.runs import assert_nothing_left, finish, rows, start, trajectories

pytestmark = pytest.mark.slow
STEPS = 3
TAKING_TURNS = ["loop.mode=colocated_sync", "cluster.gpus=1", "cluster.trainer_gpus=null", "cluster.rollout_gpus=null",
                "trainer.parallel.tp=1"]
TWO_PARTS = ["reward.kind=null",
             "reward.parts={right: {kind: exact}, form: {kind: format, pattern: '[0-9]{1,2}', weight: 0.25}}"]


@pytest.fixture(scope="module")
def run(warm_start, tmp_path_factory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("sglang")
    log = folder / "console.log"
    finish(start(["bash", "launch/quickstart.sh", "--engine", "sglang", *TAKING_TURNS, *TWO_PARTS,
                  f"loop.steps={STEPS}", "eval.every=3", "rollout.filters.zero_variance=true", "rollout.oversample=4",
                  "log.trajectories_per_step=1000", f"log.dir={folder}/runs"], log), log, timeout_s=900)
    run_dir, = (folder / "runs").iterdir()
    return SimpleNamespace(run_dir=run_dir, log=log, console=log.read_text())


def test_weights_of_every_step_arrive_and_the_first_are_verified(run):
    pushes = rows(run.run_dir, "sync")
    assert [row["sync/version"] for row in pushes] == [f"0:{step}" for step in range(STEPS + 1)]
    assert pushes[0]["sync/verified"]
    assert [row["rollout/version_lag"] for row in rows(run.run_dir, "train")] == [0.0] * STEPS


def test_trainer_and_engine_agree_on_log_probs(run):
    assert all(0 < row["rollout/logprob_diff"] < 1e-4 for row in rows(run.run_dir, "train"))


def test_it_answers_as_vllm_does(run, quickstart):
    ours, theirs = (rows(each.run_dir, "eval")[0] for each in (run, quickstart))
    assert ours["eval/heldout/prompts"] == theirs["eval/heldout/prompts"] == 500
    # Both sample at temperature 1.
    assert ours["eval/heldout/acc/mean@1"] == pytest.approx(theirs["eval/heldout/acc/mean@1"], abs=0.12)
    responses = {row["response"] for row in trajectories(run.run_dir, "step_000000")}
    assert len(responses) > 1, "every sample is the same"


def test_batches_are_full_of_groups_that_teach_and_no_prompt_is_lost(run):
    first, rejected = 0, 0
    for step, row in enumerate(rows(run.run_dir, "train")):
        groups = [each["group"] for each in trajectories(run.run_dir, f"step_{step:06d}")]
        assert row["rollout/groups_without_signal"] == row["filters/groups_missing"] == 0
        assert row["filters/refills"] == row["filters/zero_variance"]
        after = first + len(groups) + row["filters/refills"]
        assert len(groups) == 32 and sorted(set(groups)) == groups and first <= groups[0] and groups[-1] == after - 1
        first, rejected = after, rejected + row["filters/refills"]
    assert rejected > 0


def test_both_parts_of_the_reward_are_logged_and_the_judging_one_is_the_accuracy(run):
    for row in rows(run.run_dir, "train"):
        assert row["reward/mean"] == pytest.approx(row["reward/right"] + 0.25 * row["reward/form"])
        assert 0 < row["reward/right"] == row["rollout/accuracy"] < row["reward/form"]
    last = rows(run.run_dir, "eval")[-1]
    assert last["eval/heldout/reward/right/mean@1"] == last["eval/heldout/acc/mean@1"]


def test_nothing_is_left_running(run):
    assert_nothing_left(run.log)


def test_a_python_without_sglang_is_named_before_anything_starts(warm_start, home):
    done = mrl("train", "configs/quickstart_cpu.yaml", "rollout.engine=sglang",
               f"rollout.python={home}/vllm/bin/python")
    assert done.returncode == 2 and "rollout.python" in done.stderr and "has no sglang" in done.stderr
