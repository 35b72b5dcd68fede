"""`mrl train`: makes the run directory, starts the fleet and the gang of trainers, follows them, and stops all."""
from __future__ import annotations

import fcntl
import json
import os
import secrets
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, TextIO

from mrl.cluster.fleet import STOP_TIMEOUT_S, ray_address, start_fleet
from mrl.cluster.placement import place, with_device
from mrl.config.errors import ConfigError, UserError
from mrl.config.load import dump_experiment, load_experiment
from mrl.config.resume import resume_problems
from mrl.config.schema import Experiment
from mrl.engine.guard import guard_this_process
from mrl.engine.process import ProcessTree
from mrl.receiver.mrl_receiver.disk import discard
from mrl.trainer.files import saved_steps, tidy_checkpoints

FOLLOW_S = 0.2


def train(experiment: Experiment, run_dir: Path | None) -> int:
    """Run the experiment to its end. Returns the exit code: 0 when every step was trained."""
    experiment = with_device(experiment)
    run_dir = prepare_run_dir(experiment, run_dir)
    run_id = f"{experiment.name}-{secrets.token_hex(4)}"
    guard_this_process(STOP_TIMEOUT_S)
    print(f"run directory: {run_dir}", flush=True)
    print("starting the engines and the rollout workers", flush=True)
    weights = Path(experiment.sync.disk_dir or run_dir).resolve() / f"weights-{run_id}"
    with sole_owner(run_dir), start_fleet(experiment, run_id, run_dir):
        (run_dir / "run.json").write_text(json.dumps({"run_id": run_id, "ray_address": ray_address(),
                                                      "weights": str(weights)}))
        try:
            code = run_gang(experiment, run_dir)
        finally:
            discard(weights)  # the disk transport's, when the trainers died over them
    print(closing_words(experiment, run_dir, code), flush=True)
    return code


def prepare_run_dir(experiment: Experiment, run_dir: Path | None) -> Path:
    """A fresh directory under log.dir, or `run_dir`: resumed when it holds this experiment's run.

    Raises UserError when `run_dir` holds something else, a run of another experiment, or one that is going on.
    """
    if run_dir is None:
        name = f"{experiment.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        run_dir = Path(experiment.log.dir) / name
        while run_dir.exists():  # another run began in the same second
            run_dir = run_dir.with_name(f"{name}-{secrets.token_hex(2)}")
    run_dir = run_dir.resolve()
    config = run_dir / "config.yaml"
    if run_dir.exists() and any(run_dir.iterdir()) and not config.exists():
        raise UserError(f"--run-dir {run_dir} is not empty and holds no run of mrl: name another directory")
    if config.exists() and (problems := resume_problems(load_experiment(config), experiment)):
        raise ConfigError(problems)
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    with sole_owner(run_dir):  # a run that is going on keeps its own experiment and may be saving a checkpoint
        dump_experiment(experiment, config)
        tidy_checkpoints(run_dir)
    if steps := saved_steps(run_dir):
        done = ", all of them: raise loop.steps to train on" if steps[-1] >= experiment.loop.steps else ""
        print(f"resuming from checkpoint step {steps[-1]} of {experiment.loop.steps}{done}", flush=True)
    return run_dir


@contextmanager
def sole_owner(run_dir: Path) -> Iterator[None]:
    """No other `mrl train` may write to the run directory meanwhile. UserError when one does."""
    with open(run_dir / "lock", "a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another mrl train runs in {run_dir}: wait for it, or name another --run-dir") from None
        yield


def run_gang(experiment: Experiment, run_dir: Path) -> int:
    """The trainers, started again from the newest checkpoint when one of them dies, trainer.max_restarts times.

    Two attempts in a row without a single step end it early: the next would fail like them. Returns the last exit code.
    The launcher restarts the whole gang rather than torchrun, whose agent would hand the new ranks the store of the
    dead ones, stale addresses included.
    """
    progress = run_dir / "progress.log"
    progress.touch()
    idle = 0
    with open(progress, encoding="utf-8") as lines:
        lines.seek(0, os.SEEK_END)
        for left in reversed(range(experiment.trainer.max_restarts + 1)):
            attempt, before = next_attempt(run_dir / "attempt"), steps_trained(run_dir)
            code, reason = run_attempt(experiment, run_dir, attempt, lines)
            if code == 0:
                return 0
            print(f"the trainers failed in attempt {attempt} (exit code {code}):\n{reason}", file=sys.stderr)
            idle = idle + 1 if steps_trained(run_dir) == before else 0
            if idle == 2:
                print("two attempts in a row trained no step: giving up", file=sys.stderr, flush=True)
                break
            if left:
                tidy_checkpoints(run_dir)
                steps = saved_steps(run_dir)
                origin = f"checkpoint step {steps[-1]}" if steps else "step 0, since there is no checkpoint yet"
                print(f"restarting them from {origin} ({left} restarts left)", flush=True)
    return code


def next_attempt(path: Path) -> int:
    """Count the gang's starts in the file `path`: 0 for the first of a run, one more after every restart."""
    attempt = int(path.read_text()) + 1 if path.exists() else 0
    fresh = path.with_suffix(".tmp")
    fresh.write_text(str(attempt))
    os.replace(fresh, path)
    return attempt


def steps_trained(run_dir: Path) -> int:
    """How many steps the run has trained in all its attempts."""
    return sum(row["kind"] == "train" for row in metric_rows(run_dir))


def metric_rows(run_dir: Path) -> list[dict]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_attempt(experiment: Experiment, run_dir: Path, attempt: int, lines: TextIO) -> tuple[int, str]:
    """torchrun with one process a trainer rank; prints what comes into `lines` until it ends: (exit code, why)."""
    placement = place(experiment)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=0",
               f"--nproc-per-node={len(placement.trainers)}", "--monitor-interval=0.5", "-m", "mrl.cluster.rank",
               str(run_dir), str(attempt)]
    threads = max(1, (os.cpu_count() or 1) // len(placement.trainers)) if experiment.cluster.device == "cpu" else 1
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **experiment.trainer.env}
    if experiment.cluster.device == "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(placement.trainers)
        environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        if experiment.rollout.engine == "sglang":  # NCCL builds no link between ends that differ in this
            environment.setdefault("NCCL_CUMEM_ENABLE", "0")
    failures = run_dir / "logs" / "failure.txt"
    failures.unlink(missing_ok=True)
    print(f"starting {len(placement.trainers)} trainer rank(s)", flush=True)
    with ProcessTree(command, run_dir / "logs" / "torchrun.log", env=environment) as gang:
        while (code := gang.poll()) is None:
            sys.stdout.write(lines.read())
            sys.stdout.flush()
            time.sleep(FOLLOW_S)
    sys.stdout.write(lines.read())
    return code, failures.read_text() if failures.exists() else gang.tail(30)


def closing_words(experiment: Experiment, run_dir: Path, code: int) -> str:
    if code != 0:
        return f"the run failed; its logs: {run_dir}/logs. Go on from its last checkpoint with the same command and " \
               f"--run-dir {run_dir}"
    lines = []
    evaluations = [row for row in metric_rows(run_dir) if row["kind"] == "eval"]
    if len(evaluations) > 1:
        key = next(name for name in evaluations[0] if name.startswith("eval/mean@"))
        before, after = evaluations[0][key], evaluations[-1][key]
        lines.append(f"held-out {key.removeprefix('eval/')}: {before:.3f} before, {after:.3f} after")
    lines += [f"run directory: {run_dir}",
              f"next: mrl export {run_dir} --step {experiment.loop.steps} --out {run_dir}/hf",
              f"      tensorboard --logdir {run_dir}/tensorboard"]
    return "\n".join(lines)
