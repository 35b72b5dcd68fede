"""Both loop modes, with ONE engine: it dies in the middle of a rollout, then a trainer rank dies; the run completes."""
from __future__ import annotations

import json
import os
import pickle
import signal
from types import SimpleNamespace

import psutil
import pytest

from tests.e2e.runs import (
    MRL, PROJECT, assert_alive, assert_nothing_left, evaluated, finish, rows, start, trajectories, wait_for)

pytestmark = pytest.mark.slow
STEPS = 9
MODES = {
    "one_step_overlap": [],  # two ranks: one is killed, the other must not linger
    "colocated_sync": ["cluster.gpus=1", "cluster.trainer_gpus=null", "cluster.rollout_gpus=null",
                       "trainer.parallel.tp=1", "batch.minibatches=2", "algorithm.old_log_prob=recompute",
                       "algorithm.kl.coef=0.001"],
}


@pytest.fixture(scope="module", params=MODES)
def survivor(request, warm_start, tmp_path_factory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp(request.param)
    run_dir, log, armed = folder / "run", folder / "console.log", folder / "armed"
    os.environ["MRL_TEST_ARMED"] = str(armed)
    process = start([
        str(MRL), "train", "configs/quickstart_cpu.yaml", "--run-dir", str(run_dir), f"loop.mode={request.param}",
        *MODES[request.param], f"loop.steps={STEPS}", "checkpoint.every=3", "checkpoint.keep=5", "eval.every=9",
        "eval.datasets.heldout.sampling.temperature=0", "eval.datasets.heldout.max_prompts=50",
        "log.trajectories_per_step=1000", "reward.kind=custom",
        f"reward.function={PROJECT}/tests/e2e/rewards.py:exact_and_deadly"], log)
    try:
        progress = run_dir / "progress.log"
        wait_for(f"step 2/{STEPS}", progress, process, log)
        armed.write_text(json.loads((run_dir / "run.json").read_text())["run_id"])
        wait_for(f"step 5/{STEPS}", progress, process, log)
        ranks = [p for p in psutil.process_iter() if p.is_running() and "mrl.cluster.rank" in _command(p)
                 and str(run_dir) in _command(p) and "torch.distributed.run" not in _command(p)
                 and "guard.py" not in _command(p)]
        ranks[-1].send_signal(signal.SIGKILL)
        finish(process, log, timeout_s=300)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
        del os.environ["MRL_TEST_ARMED"]
    return SimpleNamespace(mode=request.param, run_dir=run_dir, log=log, console=log.read_text(), armed=armed,
                           overlap=request.param == "one_step_overlap")


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def test_the_engine_died_and_its_unfinished_groups_were_sampled_again(survivor):
    assert survivor.armed.with_suffix(".done").exists()
    regenerated = [row["rollout/groups_regenerated"] for row in rows(survivor.run_dir, "train")]
    assert 0 < max(regenerated) <= 32  # a step that was trained again after the restart counts its own again


def test_weights_are_never_older_than_promised(survivor):
    steps = rows(survivor.run_dir, "train")
    for row in steps[1:]:
        newest, oldest = (1 - row["rollout/groups_regenerated"] / 32, 1) if survivor.overlap else (0, 0)
        assert newest <= row["rollout/version_lag"] <= oldest
    if survivor.overlap:
        assert min(row["rollout/version_lag"] for row in steps[1:]) < 1, "no group came from the engine's new weights"


def test_nothing_is_lost_or_doubled(survivor):
    for step in range(STEPS):
        groups = [row["group"] for row in trajectories(survivor.run_dir, f"step_{step:06d}")]
        assert groups == list(range(32 * step, 32 * (step + 1))), f"step {step}"


def test_an_overlapped_checkpoint_keeps_the_batch_that_was_collected(survivor):
    if not survivor.overlap:
        pytest.skip("only one_step_overlap has a batch waiting at its checkpoints")
    # Step 3's batch was sampled by version 2 of the first attempt; the second attempt trains just that.
    batch = pickle.loads((survivor.run_dir / "checkpoints" / "step_000003" / "batch.pkl").read_bytes())
    trained = trajectories(survivor.run_dir, "step_000003")
    assert [group.trajectories[0].response_text for group in batch] == [row["response"] for row in trained]
    assert {row["version"] for row in trained} <= {"0:2", "0:3"}


def test_the_gang_went_on_from_its_checkpoint_as_a_new_attempt(survivor):
    assert [row["step"] for row in rows(survivor.run_dir, "train")] in (
        [1, 2, 3, 4, 5, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8, 9])
    versions = [row["sync/version"] for row in rows(survivor.run_dir, "sync")]
    resumed = versions.index("1:3")
    assert all(v.startswith("0:") for v in versions[:resumed]) and versions[-1] == f"1:{STEPS}"
    assert "restarting them from checkpoint step 3" in survivor.console
    assert survivor.console.count("starting the engines") == 1
    saved = sorted(path.name for path in (survivor.run_dir / "checkpoints").iterdir())
    assert saved == ["step_000003", "step_000006", "step_000009"]


def test_timings_have_the_parts_of_their_mode(survivor):
    for row in rows(survivor.run_dir, "train"):
        named = {name.removeprefix("timing/") for name in row if name.startswith("timing/")}
        if survivor.overlap:
            expected = {"wait_prev_gen", "update_actor", "sync"}
        else:
            expected = {"gen", "old_log_prob", "ref_log_prob", "update_actor", "sync"}
        if row["step"] == STEPS:  # nothing is left to wait for
            expected -= {"wait_prev_gen", "gen"}
        assert named - {"checkpoint"} == expected | {"step", "other", "generate_sequences"}
        assert row["timing/step"] == pytest.approx(sum(row[f"timing/{name}"] for name in named) -
                                                   row["timing/step"] - row["timing/generate_sequences"], abs=1e-6)


def test_nothing_is_left_running(survivor):
    assert_nothing_left(survivor.log)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_run_leaves_no_process(warm_start, tmp_path, number):
    run_dir, log = tmp_path / "run", tmp_path / "console.log"
    process = start([str(MRL), "train", "configs/quickstart_cpu.yaml", "--run-dir", str(run_dir),
                     "trainer.parallel.tp=1", "cluster.trainer_gpus=1"], log)
    # SIGKILL is for a run in full swing; the others must also work while the engine is still starting.
    if number == signal.SIGKILL:
        wait_for("step 1/", run_dir / "progress.log", process, log)
        assert_alive(log, "api_server", "guard.py", "VLLM::", "raylet", "ray::RolloutWorker", "mrl.cluster.rank")
    else:
        wait_for("vllm", run_dir / "logs" / "engine_0.log", process, log)
        assert_alive(log, "api_server", "guard.py", "raylet")
    process.send_signal(number)
    process.wait(60)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}.get(number, -number)
    assert_nothing_left(log)


@pytest.fixture(scope="module")
def notes() -> dict:
    return {}


def test_the_same_seed_gives_the_same_prompts_and_greedy_answers(survivor, notes):
    """Compares the two modes' runs, which share seed and starting weights."""
    first = [(row["group"], row["prompt"], row["version"]) for row in trajectories(survivor.run_dir, "step_000000")]
    greedy = [(row["prompt"], row["response"]) for row in evaluated(survivor.run_dir, 0)]
    order = [row["prompt"] for row in trajectories(survivor.run_dir, f"step_{STEPS - 1:06d}")]
    notes[survivor.mode] = (first, greedy, order)
    if len(notes) == len(MODES):
        one, other = notes.values()
        assert one[0] == other[0] and one[2] == other[2]
        assert one[1] == other[1]
