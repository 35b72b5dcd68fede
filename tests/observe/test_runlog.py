"""What a run writes about itself."""
from __future__ import annotations

import json

import pytest

from mrl.config.schema import Eval, Log
from mrl.observe.runlog import RunLog
from mrl.stream.report import PushReport
from tests.rollout.groups import group


@pytest.fixture
def log(tmp_path):
    made = RunLog(tmp_path, Log(trajectories_per_step=2, logprob_diff_alarm=0.1), steps=9, attempt=1)
    yield made
    made.close()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


STEP = {"reward/mean": 0.5, "rollout/accuracy": 0.5, "rollout/response_length": 3.0, "rollout/logprob_diff": 0.01,
        "actor/grad_norm": 1.0, "actor/update_skipped": 0.0, "timing/step": 2.0, "timing/sync": 0.5, "timing/gen": 0.0}


def test_a_step_is_a_row_a_line_and_a_curve(log, tmp_path):
    log.step(3, STEP)
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 3, "attempt": 1, "kind": "train", **STEP}]
    progress = (tmp_path / "progress.log").read_text()
    assert "step 3/9 reward 0.500 acc 0.500 len 3.0 logprob_diff 0.0100" in progress and "2.00s = sync 0.50" in progress
    assert any((tmp_path / "tensorboard").iterdir())


def test_what_should_worry_is_said(log, tmp_path):
    log.step(3, {**STEP, "rollout/logprob_diff": 0.3, "actor/update_skipped": 1.0})
    progress = (tmp_path / "progress.log").read_text()
    assert "disagree on log-probabilities by 0.300" in progress and "an update was skipped" in progress


def test_a_batch_that_is_not_full_or_empty_is_said(log, tmp_path):
    short = {"filters/groups_missing": 3, "filters/prompts_used": 0.25}
    log.step(3, {**STEP, **short})
    log.step(4, {**short, "timing/step": 2.0})
    progress = (tmp_path / "progress.log").read_text()
    assert "step 3: 3 groups of the batch are missing, since rollout.filters left out 75% of the prompts" in progress
    assert "step 3/9 reward" in progress and "step 4/9 trained nothing" in progress
    assert lines(tmp_path / "metrics.jsonl")[1]["filters/groups_missing"] == 3


def test_an_evaluation_is_logged_under_the_step_that_asked(log, tmp_path):
    groups = [group(i, [1.0], dataset="heldout") for i in range(3)]
    config = Eval.model_validate({"datasets": {"heldout": {"path": "x"}, "absent": {"path": "y"}}})
    log.evaluation(groups, config, seed=1)
    row, = lines(tmp_path / "metrics.jsonl")
    assert (row["step"], row["kind"]) == (0, "eval")
    assert (row["eval/heldout/acc/mean@1"], row["eval/heldout/prompts"]) == (1.0, 3)
    samples = lines(tmp_path / "evaluations" / "step_000000" / "heldout.jsonl")
    assert [sample["row"] for sample in samples] == [0, 1, 2] and samples[0]["correct"] is True
    assert "evaluation after step 0: heldout acc/mean@1 1.000 reward/mean@1 1.000 (3 prompts)" in (
        tmp_path / "progress.log").read_text()


def test_samples_are_not_kept_when_not_wanted(log, tmp_path):
    config = Eval.model_validate({"datasets": {"heldout": {"path": "x"}}, "save_samples": False})
    log.evaluation([group(0, [1.0], dataset="heldout")], config, seed=1)
    assert not (tmp_path / "evaluations").exists()


def test_a_failed_push_names_the_engine(log, tmp_path):
    log.push(4, PushReport(
        version="1:4", strategy="broadcast", seconds=1.0, gather_s=0.1, send_s=0.2, load_s=0.3, transfer_s=0.4,
        bytes=10, sent_fraction=0.5, errors={0: None, 1: "broken"}, absent={2: "it is starting"}, verified=False))
    row, = lines(tmp_path / "metrics.jsonl")
    assert (row["kind"], row["sync/bytes"], row["sync/sent_fraction"]) == ("sync", 10, 0.5)
    progress = (tmp_path / "progress.log").read_text()
    assert "engine 1 did not take the weights of step 4: broken" in progress and "engine 2" in progress
    assert "engine 0" not in progress


def test_samples_that_could_not_be_scored_are_named(log, tmp_path):
    groups = [group(i, [0.0] * 3) for i in range(3)]
    for broken in groups[1:]:
        for trajectory in broken.trajectories:
            trajectory.reward_error, trajectory.reward_parts = "math: timeout: too long", {"math": 0.0}
    log.trajectories("step_000002", groups)
    said = (tmp_path / "progress.log").read_text()
    assert "step_000002: sample 2 of group 1 (row 1) could not be scored: math: timeout: too long" in said
    assert said.count("could not be scored") == 5 and "nor could 1 others" in said
    assert lines(tmp_path / "trajectories" / "step_000002.jsonl")[1]["reward_parts"] == {"math": 0.0}
