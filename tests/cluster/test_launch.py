"""The launcher's own decisions: run directories, resuming, when to give up. Running it for real is in tests/e2e."""
from __future__ import annotations

import json

import pytest

from mrl.cluster import launch, run_dir as run_dirs, trainers
from mrl.config.errors import ConfigError, UserError
from tests.rollout.experiments import experiment


def test_a_new_run_directory_holds_the_resolved_experiment(tmp_path):
    run_dir = run_dirs.prepare_run_dir(experiment(log={"dir": str(tmp_path)}), None)
    assert run_dir.parent == tmp_path and run_dir.name.startswith("experiment-")
    assert (run_dir / "logs").is_dir() and "prompts_per_step: 2" in (run_dir / "config.yaml").read_text()


def test_a_run_is_resumed_with_more_steps_but_not_as_another_experiment(tmp_path, capsys):
    run_dir = run_dirs.prepare_run_dir(experiment(), tmp_path / "run")
    (run_dir / "checkpoints" / "step_000002").mkdir(parents=True)
    run_dirs.prepare_run_dir(experiment(loop={"steps": 5}), run_dir)
    assert "resuming from checkpoint step 2 of 5" in capsys.readouterr().out
    run_dirs.prepare_run_dir(experiment(), run_dir)
    assert "all of them: raise loop.steps" in capsys.readouterr().out
    before = (run_dir / "config.yaml").read_text()
    with pytest.raises(ConfigError, match="batch.samples_per_prompt"):
        run_dirs.prepare_run_dir(experiment(batch={"samples_per_prompt": 3}), run_dir)
    assert (run_dir / "config.yaml").read_text() == before


def interrupted_save(run_dir, step: int) -> None:
    """What is left of a save over checkpoint `step` that was killed between its two renames."""
    for name, content in ((f"step_{step:06d}.old", "whole"), (f"step_{step:06d}.tmp", "new")):
        folder = run_dir / "checkpoints" / name
        folder.mkdir(parents=True)
        (folder / "meta.json").write_text(content)


def checkpoints(run_dir) -> dict[str, str]:
    return {path.name: (path / "meta.json").read_text() for path in (run_dir / "checkpoints").iterdir()}


def test_a_checkpoint_whose_replacement_was_interrupted_is_resumed_from(tmp_path, capsys):
    run_dir = launch.prepare_run_dir(experiment(), tmp_path / "run")
    interrupted_save(run_dir, 2)
    launch.prepare_run_dir(experiment(loop={"steps": 5}), run_dir)
    assert "resuming from checkpoint step 2 of 5" in capsys.readouterr().out
    assert checkpoints(run_dir) == {"step_000002": "whole"}


def test_two_runs_of_one_second_do_not_share_a_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(run_dirs.time, "strftime", lambda form: "20260101-000000")
    exp = experiment(log={"dir": str(tmp_path)})
    assert run_dirs.prepare_run_dir(exp, None) != run_dirs.prepare_run_dir(exp, None)


def test_a_run_directory_has_one_launcher_at_a_time(tmp_path):
    with run_dirs.sole_owner(tmp_path):
        with pytest.raises(UserError, match="another mrl train or mrl sft runs in"):
            with run_dirs.sole_owner(tmp_path):
                pass
    with run_dirs.sole_owner(tmp_path):
        pass


def test_the_experiment_of_a_run_that_is_going_on_is_not_overwritten(tmp_path):
    run_dir = run_dirs.prepare_run_dir(experiment(), tmp_path / "run")
    before = (run_dir / "config.yaml").read_text()
    with run_dirs.sole_owner(run_dir), pytest.raises(UserError, match="another mrl train or mrl sft runs in"):
        run_dirs.prepare_run_dir(experiment(loop={"steps": 5}), run_dir)
    assert (run_dir / "config.yaml").read_text() == before


def test_a_directory_with_other_things_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match="holds no run"):
        run_dirs.prepare_run_dir(experiment(), tmp_path)


@pytest.fixture
def attempts(monkeypatch, tmp_path):
    """Runs `run_gang` with attempts that fail or succeed and train some steps, as listed; returns (code, attempts)."""
    def run(outcomes: list[tuple[int, int]], max_restarts: int = 3, at_start=lambda: None) -> tuple[int, list[int]]:
        made = []

        def attempt(exp, run_dir, number, lines):
            at_start()
            code, steps = outcomes[len(made)]
            made.append(number)
            with open(run_dir / "metrics.jsonl", "a") as file:
                file.writelines(json.dumps({"kind": "train"}) + "\n" for _ in range(steps))
            return code, "why"
        monkeypatch.setattr(trainers, "run_attempt", attempt)
        gang = launch.trainer_gang(experiment(trainer={"max_restarts": max_restarts}))
        return trainers.run_gang(gang, tmp_path), made
    return run


def test_the_gang_is_restarted_as_often_as_allowed(attempts):
    assert attempts([(1, 2), (1, 2), (0, 2)]) == (0, [0, 1, 2])
    assert attempts([(1, 2), (9, 2)], max_restarts=1) == (9, [3, 4])


def test_a_gang_that_died_while_saving_is_restarted_from_what_it_would_have_replaced(attempts, tmp_path, capsys):
    saves = iter([lambda: interrupted_save(tmp_path, 4), lambda: None])
    assert attempts([(1, 2), (0, 2)], at_start=lambda: next(saves)()) == (0, [0, 1])
    assert "restarting them from checkpoint step 4" in capsys.readouterr().out
    assert checkpoints(tmp_path) == {"step_000004": "whole"}


def test_two_attempts_without_a_step_end_it(attempts, capsys):
    assert attempts([(1, 3), (1, 0), (1, 0), (0, 9)]) == (1, [0, 1, 2])
    assert "two attempts in a row trained no step" in capsys.readouterr().err


def test_closing_words_name_the_accuracy_and_what_to_do_next(tmp_path):
    rows = [{"kind": "eval", "eval/heldout/acc/mean@4": 0.25, "eval/new/acc/mean@1": 0.0}, {"kind": "train"},
            {"kind": "eval", "eval/heldout/acc/mean@4": 0.75}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    datasets = {"heldout": {"path": "x", "samples_per_prompt": 4}, "new": {"path": "y"}}
    words = launch.closing_words(experiment(eval={"datasets": datasets}), tmp_path, 0)
    assert "held-out heldout acc/mean@4: 0.250 before, 0.750 after" in words and "held-out new" not in words
    assert f"mrl export {tmp_path} --step 2" in words
    assert f"--run-dir {tmp_path}" in launch.closing_words(experiment(), tmp_path, 1)
