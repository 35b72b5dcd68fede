"""Both loop modes, each with ONE engine of another kind: it dies in the middle of a rollout, then a trainer rank dies;
the run completes."""
from __future__ import annotations

import json
import os
import pickle
import re
import signal
from types import SimpleNamespace

import psutil
import pytest

from tests.e2e.runs import (
    MRL, PROJECT, assert_nothing_left, evaluated, finish, rows, start, trajectories, wait_alive, wait_for, with_engine,
)

pytestmark = pytest.mark.slow
STEPS = 9
ENGINES = {"one_step_overlap": "sglang", "colocated_sync": "vllm"}  # test_quickstart, test_sglang: the other way round
MODES = {
    "one_step_overlap": [],  # two ranks: one is killed, the other must not linger
    "colocated_sync": ["cluster.gpus=1", "cluster.trainer_gpus=null", "cluster.rollout_gpus=null",
                       "trainer.parallel.tp=1", "batch.minibatches=2", "algorithm.old_log_prob=recompute",
                       "algorithm.kl.coef=0.001"],
}


@pytest.fixture(scope="module", params=MODES)
def survivor(request, warm_start, home, tmp_path_factory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp(request.param)
    run_dir, log, armed = folder / "run", folder / "console.log", folder / "armed"
    os.environ["MRL_TEST_ARMED"] = str(armed)
    process = start([
        str(MRL), "train", "configs/quickstart_cpu.yaml", "--run-dir", str(run_dir), f"loop.mode={request.param}",
        *MODES[request.param], *with_engine(home, ENGINES[request.param]), f"loop.steps={STEPS}", "checkpoint.every=3",
        "checkpoint.keep=5", "eval.every=9",
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
        finish(process, log, timeout_s=900)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(300)
        del os.environ["MRL_TEST_ARMED"]
    console = log.read_text()
    # How far the run comes before its rank is dead depends on the machine.
    restart, = re.findall(r"restarting them from checkpoint step (\d+)", console)
    return SimpleNamespace(mode=request.param, run_dir=run_dir, log=log, console=console, armed=armed,
                           overlap=request.param == "one_step_overlap", restart=int(restart))


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


def test_trainer_and_engine_agree_on_the_batches_they_share_weights_for(survivor):
    shared = [row for row in rows(survivor.run_dir, "train") if row["rollout/version_lag"] == 0]
    assert shared and all(0 < row["rollout/logprob_diff"] < 1e-4 for row in shared)


def test_nothing_is_lost_or_doubled(survivor):
    for step in range(STEPS):
        groups = [row["group"] for row in trajectories(survivor.run_dir, f"step_{step:06d}")]
        assert groups == list(range(32 * step, 32 * (step + 1))), f"step {step}"


def test_an_overlapped_checkpoint_keeps_the_batch_that_was_collected(survivor):
    if not survivor.overlap:
        pytest.skip("only one_step_overlap has a batch waiting at its checkpoints")
    # It was sampled by the first attempt's version before the checkpoint's; the second attempt trains just that.
    name = f"step_{survivor.restart:06d}"
    batch = pickle.loads((survivor.run_dir / "checkpoints" / name / "batch.pkl").read_bytes())
    trained = trajectories(survivor.run_dir, name)
    assert [group.trajectories[0].response_text for group in batch] == [row["response"] for row in trained]
    assert {row["version"] for row in trained} <= {f"0:{survivor.restart - 1}", f"0:{survivor.restart}"}


def test_the_gang_went_on_from_its_checkpoint_as_a_new_attempt(survivor):
    steps = [row["step"] for row in rows(survivor.run_dir, "train")]
    before = steps[:-(STEPS - survivor.restart)]
    assert before == [*range(1, len(before) + 1)] and len(before) >= max(5, survivor.restart)
    assert steps[len(before):] == [*range(survivor.restart + 1, STEPS + 1)]
    versions = [row["sync/version"] for row in rows(survivor.run_dir, "sync")]
    resumed = versions.index(f"1:{survivor.restart}")
    assert all(v.startswith("0:") for v in versions[:resumed]) and versions[-1] == f"1:{STEPS}"
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


ONE_RANK = ["trainer.parallel.tp=1", "cluster.trainer_gpus=1"]
SERVERS = {"vllm": r"^\S+ -m vllm", "sglang": r"^\S+ \S+sglang_cpu_server"}  # not their guards, which name them later
EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}


def stop(process, log, number: signal.Signals) -> None:
    """Nothing of the run outlives it."""
    process.send_signal(number)
    assert process.wait(300) == EXIT_CODES[number]
    assert_nothing_left(log)


def test_runs_stopped_while_their_engines_start_leave_no_process(warm_start, home, tmp_path):
    """One with each engine, both at once."""
    runs = []
    for engine, number in (("vllm", signal.SIGINT), ("sglang", signal.SIGTERM)):
        log = tmp_path / f"{engine}.log"
        process = start([str(MRL), "train", "configs/quickstart_cpu.yaml", "--run-dir", str(tmp_path / engine),
                         *with_engine(home, engine), *ONE_RANK], log)
        runs.append((process, log, number, engine))
    for process, log, number, engine in runs:
        wait_alive(process, log, "guard.py", SERVERS[engine], "raylet")
        stop(process, log, number)


def test_a_run_killed_in_full_swing_leaves_no_process(warm_start, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "console.log"
    process = start([str(MRL), "train", "configs/quickstart_cpu.yaml", "--run-dir", str(run_dir), *ONE_RANK], log)
    wait_for("step 1/", run_dir / "progress.log", process, log)
    wait_alive(process, log, "guard.py", "api_server", "VLLM::", "raylet", "ray::RolloutWorker", "mrl.cluster.rank")
    stop(process, log, signal.SIGKILL)


@pytest.fixture(scope="module")
def notes() -> dict:
    return {}


def test_the_same_seed_gives_the_same_prompts_and_greedy_answers(survivor, notes):
    """Compares the runs of the two modes, and so of the two engines, which share seed and starting weights."""
    first = [(row["group"], row["prompt"], row["version"]) for row in trajectories(survivor.run_dir, "step_000000")]
    greedy = [(row["prompt"], row["response"]) for row in evaluated(survivor.run_dir, 0)]
    order = [row["prompt"] for row in trajectories(survivor.run_dir, f"step_{STEPS - 1:06d}")]
    notes[survivor.mode] = (first, greedy, order)
    if len(notes) == len(MODES):
        one, other = notes.values()
        assert one[0] == other[0] and one[2] == other[2]
        assert one[1] == other[1]
