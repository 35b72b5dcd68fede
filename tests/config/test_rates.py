"""`mrl check --rates`: splits of GPUs from the timings of a run, by hand."""
import json

import pytest

from mrl.config.errors import UserError
from mrl.config.load import load_experiment
from mrl.rates import Rates, Shared, colocated, measured, report, splits
from tests.config.test_cli import row


@pytest.fixture
def run_dir(tmp_path, experiment_file):
    """A run of 4 trainer and 2 rollout GPUs: 10 s of generation, 2 + 3 s of training, 1 s of sync."""
    folder = tmp_path / "run"
    folder.mkdir()
    exp = load_experiment(experiment_file, ["cluster.trainer_gpus=4", "cluster.rollout_gpus=2"])
    (folder / "config.yaml").write_text(exp.model_dump_json())
    steps = [{"step": step, "kind": "train", "timing/generate_sequences": 10.0, "timing/old_log_prob": 2.0,
              "timing/update_actor": 3.0, "timing/sync": 1.0} for step in range(2, 6)]
    first = {**steps[0], "step": 1, "timing/update_actor": 1000.0}
    lines = [first, {"step": 1, "kind": "sync"}, *steps]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_rates_are_gpu_seconds_of_the_median_step(run_dir):
    assert measured(run_dir) == Rates(generation=20.0, training=20.0, sync=1.0, steps=4)
    assert measured(run_dir, among=range(1, 5)).steps == 3  # the very first never counts


def test_every_division_into_whole_replicas_and_engines(experiment_file):
    exp = load_experiment(experiment_file, ["trainer.parallel.tp=2", "rollout.parallel.tp=1"])
    found = splits(exp, Rates(generation=60.0, training=12.0, sync=1.0, steps=4), 8)
    assert [(split.trainer_gpus, split.rollout_gpus) for split in found] == [(2, 6), (4, 4), (6, 2)]
    assert [split.step_s for split in found] == [11.0, 16.0, 31.0]
    assert found[0].trainer_idle == pytest.approx(5 / 11) and found[0].rollout_idle == pytest.approx(1 / 11)
    assert colocated(exp, Rates(60.0, 12.0, 1.0, 4), 8) == Shared(8, 0, 10.0)


def test_a_teacher_has_gpus_of_its_own(invoke, run_dir, experiment_file, folder):
    overrides = ["algorithm.name=distill", f"teacher={{path: {folder}/model, python: x, parallel: {{tp: 2}}}}",
                 "cluster.teacher_gpus=4"]
    with pytest.raises(UserError, match="that run had no teacher"):
        report(load_experiment(experiment_file, overrides), run_dir, 8)
    exp = load_experiment(experiment_file, [*overrides, "cluster.trainer_gpus=4", "cluster.rollout_gpus=2"])
    (run_dir / "config.yaml").write_text(exp.model_dump_json())
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    taught = [json.dumps({**json.loads(line), "timing/teach_sequences": 6.0}) for line in lines]
    (run_dir / "metrics.jsonl").write_text("\n".join(taught))
    found = measured(run_dir)
    assert found == Rates(generation=20.0, training=20.0, sync=1.0, steps=4, teaching=24.0)
    divided = {(s.trainer_gpus, s.rollout_gpus, s.teacher_gpus): (s.step_s, s.teacher_idle)
               for s in splits(exp, found, 8)}
    assert divided[2, 2, 4] == (11.0, pytest.approx(1 - 6 / 11)) and divided[4, 2, 2] == (13.0, pytest.approx(1 / 13))
    assert (4, 1, 3) not in divided  # the teacher's engines have two GPUs each
    assert colocated(exp, found, 8) == Shared(4, 4, 12.0)  # 6 s of the teacher, then 5 of training
    result = invoke("check", experiment_file, *overrides, "--rates", run_dir, "--gpus", 8)
    assert result.exit_code == 0, result.output
    assert "cluster.trainer_gpus=2 cluster.rollout_gpus=2 cluster.teacher_gpus=4" in result.output
    assert "teacher 24.0 GPU-seconds" in result.output and "on 4 and 4 for the teacher: 12.00 s" in result.output


def test_the_command_recommends_the_fastest(invoke, run_dir, experiment_file):
    result = invoke("check", experiment_file, "--rates", run_dir, "--gpus", 8)
    assert result.exit_code == 0, result.output
    assert row(result.output, "4")[1:3] == ["4", "6.00 s"]
    assert "cluster.trainer_gpus=4 cluster.rollout_gpus=4" in result.output


def test_what_is_no_run_or_too_short(tmp_path, run_dir):
    with pytest.raises(UserError, match="no config.yaml there; name the directory of a run"):
        measured(tmp_path / "nothing")
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    (run_dir / "metrics.jsonl").write_text("\n".join(lines[:4]))
    with pytest.raises(UserError, match="2 steps after the first, at least 3 are needed"):
        measured(run_dir)
