"""A run's directory: a fresh one, or one whose run goes on; written to by one launcher at a time."""
from __future__ import annotations

import fcntl
import secrets
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

from mrl.config.errors import ConfigError, UserError
from mrl.config.load import dump_experiment, load_like
from mrl.config.resume import resume_problems
from mrl.config.schema import Experiment
from mrl.config.sft import SftExperiment
from mrl.trainer.files import saved_steps, tidy_checkpoints


def prepare_run_dir(experiment: Experiment | SftExperiment, run_dir: Path | None) -> Path:
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
    if config.exists() and (problems := resume_problems(load_like(experiment, config), experiment)):
        raise ConfigError(problems)
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    with sole_owner(run_dir):  # a run that is going on keeps its own experiment and may be saving a checkpoint
        dump_experiment(experiment, config)
        tidy_checkpoints(run_dir)
    key, total = ("steps", experiment.steps) if isinstance(experiment, SftExperiment) else (
        "loop.steps", experiment.loop.steps)
    if steps := saved_steps(run_dir):
        done = f", all of them: raise {key} to train on" if steps[-1] >= total else ""
        print(f"resuming from checkpoint step {steps[-1]} of {total}{done}", flush=True)
    return run_dir


@contextmanager
def sole_owner(run_dir: Path) -> Iterator[None]:
    """No other launcher may write to the run directory meanwhile. UserError when one does."""
    with open(run_dir / "lock", "a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another mrl train or mrl sft runs in {run_dir}: wait for it, or name another "
                            "--run-dir") from None
        yield
