"""The main job as a new user runs it, in one_step_overlap mode: it learns, and its records say what they should."""
from __future__ import annotations

import re
from statistics import median

import pytest

from tests.e2e.conftest import mrl
from tests.e2e.runs import assert_nothing_left, evaluated, rows, trajectories

pytestmark = pytest.mark.slow


def test_held_out_accuracy_rises_by_20_points(quickstart):
    evaluations = rows(quickstart.run_dir, "eval")
    assert [row["step"] for row in evaluations] == [0, 20, 40, 60]
    before, after = evaluations[0]["eval/heldout/acc/mean@1"], evaluations[-1]["eval/heldout/acc/mean@1"]
    assert evaluations[0]["eval/heldout/prompts"] == 500
    assert after - before >= 0.20, f"{before:.3f} -> {after:.3f}"
    assert f"{before:.3f} before, {after:.3f} after" in quickstart.console


def test_every_step_is_reported_on_the_console(quickstart):
    for step in range(1, quickstart.steps + 1):
        assert re.search(rf"step {step}/{quickstart.steps} reward \S+ acc \S+ len \S+ logprob_diff \S+ .* sync ",
                         quickstart.console)
    assert f"run directory: {quickstart.run_dir}" in quickstart.console
    assert "next: mrl export" in quickstart.console


def test_batches_are_one_step_old_but_for_the_first(quickstart):
    steps = rows(quickstart.run_dir, "train")
    assert [row["step"] for row in steps] == list(range(1, quickstart.steps + 1))
    assert [row["rollout/version_lag"] for row in steps] == [0.0] + [1.0] * (quickstart.steps - 1)
    assert sum(row["rollout/groups_regenerated"] for row in steps) == 0


def test_every_version_was_pushed_once_and_the_first_verified(quickstart):
    pushes = rows(quickstart.run_dir, "sync")
    assert [row["sync/version"] for row in pushes] == [f"0:{step}" for step in range(quickstart.steps + 1)]
    assert pushes[0]["sync/verified"] and not any(row["sync/verified"] for row in pushes[1:])


def test_trainer_and_engine_agree_on_the_batch_they_share_weights_for(quickstart):
    first = rows(quickstart.run_dir, "train")[0]
    assert 0 < first["rollout/logprob_diff"] < 1e-4


def test_timings_add_up(quickstart):
    steps = rows(quickstart.run_dir, "train")
    parts = ("wait_prev_gen", "old_log_prob", "ref_log_prob", "update_actor", "sync", "checkpoint", "other")
    for row in steps:
        total = sum(row.get(f"timing/{name}", 0.0) for name in parts)
        assert row["timing/step"] == pytest.approx(total, abs=1e-6)
    assert median(row["timing/other"] / row["timing/step"] for row in steps) <= 0.1


def test_waiting_is_what_training_did_not_cover(quickstart):
    # Evaluations share the engine with the next batch, so the steps after them wait longer for another reason.
    steps = [row for row in rows(quickstart.run_dir, "train")[1:-1] if row["step"] % 20 not in (0, 1)]
    errors = []
    for row, later in zip(steps, steps[1:]):
        if later["step"] == row["step"] + 1:
            expected = max(0.0, later["timing/generate_sequences"] - row["timing/update_actor"])
            errors.append(abs(row["timing/wait_prev_gen"] - expected) / row["timing/step"])
    assert median(errors) < 0.35  # about 0.65, if nothing overlapped


def test_run_directory_is_complete_and_nothing_is_left_running(quickstart):
    run_dir = quickstart.run_dir
    for name in ("config.yaml", "metrics.jsonl", "tensorboard", "logs/engine_0.log", "logs/rank_0.log",
                 "logs/rank_1.log", f"checkpoints/step_{quickstart.steps:06d}"):
        assert (run_dir / name).exists(), name
    sample = trajectories(run_dir, "step_000003")[0]
    assert re.fullmatch(r"\d+", sample["answer"]) and sample["version"] == "0:2" and "+" in sample["prompt"]
    assert_nothing_left(quickstart.log)


def test_held_out_prompts_are_never_trained_on(quickstart):
    trained = {row["prompt"] for step in range(quickstart.steps)
               for row in trajectories(quickstart.run_dir, f"step_{step:06d}")}
    held_out = {row["prompt"] for row in evaluated(quickstart.run_dir, 0)}
    assert trained and held_out and not trained & held_out


def test_export_and_eval_agree_with_the_run(quickstart, tmp_path):
    out = tmp_path / "hf"
    done = mrl("export", str(quickstart.run_dir), "--step", str(quickstart.steps), "--out", str(out))
    assert done.returncode == 0, done.stderr
    again = mrl("export", str(quickstart.run_dir), "--out", str(out))
    assert again.returncode == 2 and "not empty" in again.stderr
    done = mrl("eval", "configs/quickstart_cpu.yaml", "--model", str(out), f"log.dir={tmp_path}",
               "eval.datasets.heldout.max_prompts=200", "eval.datasets.heldout.samples_per_prompt=4")
    assert done.returncode == 0, done.stdout + done.stderr
    values = dict(re.findall(r"((?:acc/)?(?:mean|best|maj|pass)@4)\D+([01]\.\d+)", done.stdout))
    after = rows(quickstart.run_dir, "eval")[-1]["eval/heldout/acc/mean@1"]
    assert float(values["acc/mean@4"]) == pytest.approx(after, abs=0.12)
    assert float(values["acc/best@4"]) >= float(values["acc/maj@4"]) >= float(values["acc/mean@4"]) - 0.05
    assert float(values["pass@4"]) >= float(values["acc/best@4"])  # which draws with replacement
    samples, = tmp_path.glob("quickstart-eval-*/samples/heldout.jsonl")
    assert len(samples.read_text().splitlines()) == 800
