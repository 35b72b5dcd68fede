"""The gang of trainer ranks as the launcher sees it: torchrun, started anew from the last checkpoint when it fails."""
from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from mrl.engine.process import ProcessTree
from mrl.trainer.files import saved_steps, tidy_checkpoints

FOLLOW_S = 0.2


@dataclass(frozen=True)
class Gang:
    """What to start. Each rank runs `python -m <module> RUN_DIR ATTEMPT`, and writes for the user to progress.log.

    devices: one name a rank, as CUDA_VISIBLE_DEVICES takes them; on cpu they only count. env: added to the ranks'
    environment.
    """

    module: str
    device: str
    devices: tuple[str, ...]
    max_restarts: int
    env: Mapping[str, str]

    def environment(self) -> dict[str, str]:
        """The ranks' whole environment."""
        threads = max(1, (os.cpu_count() or 1) // len(self.devices)) if self.device == "cpu" else 1
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **self.env}
        if self.device == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.devices)
            environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        return environment


def run_gang(gang: Gang, run_dir: Path) -> int:
    """The trainers, started again from the newest checkpoint when one of them dies, max_restarts times.

    Two attempts in a row without a single step end it early: the next would fail like them. Returns the last exit code.
    The launcher restarts the whole gang rather than torchrun, whose agent would hand the new ranks the store of the
    dead ones, stale addresses included.
    """
    progress = run_dir / "progress.log"
    progress.touch()
    idle = 0
    with open(progress, encoding="utf-8") as lines:
        lines.seek(0, os.SEEK_END)
        for left in reversed(range(gang.max_restarts + 1)):
            attempt, before = next_attempt(run_dir / "attempt"), steps_trained(run_dir)
            code, reason = run_attempt(gang, run_dir, attempt, lines)
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
    """All rows of metrics.jsonl; none if there is no such file."""
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_attempt(gang: Gang, run_dir: Path, attempt: int, lines: TextIO) -> tuple[int, str]:
    """torchrun with one process a trainer rank; prints what comes into `lines` until it ends: (exit code, why)."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=0",
               f"--nproc-per-node={len(gang.devices)}", "--monitor-interval=0.5", "-m", gang.module,
               str(run_dir), str(attempt)]
    failures = run_dir / "logs" / "failure.txt"
    failures.unlink(missing_ok=True)
    print(f"starting {len(gang.devices)} trainer rank(s)", flush=True)
    with ProcessTree(command, run_dir / "logs" / "torchrun.log", env=gang.environment()) as tree:
        while (code := tree.poll()) is None:
            sys.stdout.write(lines.read())
            sys.stdout.flush()
            time.sleep(FOLLOW_S)
    sys.stdout.write(lines.read())
    return code, failures.read_text() if failures.exists() else tree.tail(30)
