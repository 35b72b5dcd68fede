"""Runs of the real thing for this folder's tests: started as a user starts them, read back from their directory."""
from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.signals import interruptible

PROJECT = Path(__file__).parents[2]
MRL = Path(sys.executable).parent / "mrl"
MARK = "MRL_TEST_LOG"


def with_engine(home: Path, engine: str) -> list[str]:
    """Overrides for an experiment with this engine, from its environment in `home`."""
    return [f"rollout.engine={engine}", f"rollout.python={home}/{engine}/bin/python"]


def start(command: list[str], log: Path) -> subprocess.Popen:
    """Output goes to `log`, whose path also marks, in the environment, every process that the command starts."""
    with open(log, "w", encoding="utf-8") as file:
        return subprocess.Popen(command, cwd=PROJECT, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                env={**os.environ, MARK: str(log)}, preexec_fn=interruptible)


def finish(process: subprocess.Popen, log: Path, timeout_s: float) -> None:
    """Wait for exit code 0. AssertionError with the end of the log otherwise."""
    try:
        code = process.wait(timeout_s)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(300)
    assert code == 0, f"exit code {code}\n{log.read_text()[-4000:]}"


def wait_for(text: str, path: Path, process: subprocess.Popen, log: Path, timeout_s: float = 600) -> None:
    """Until `text` stands in the file `path`; fails when the run ends first."""
    deadline = time.monotonic() + timeout_s
    while not (path.exists() and text in path.read_text()):
        assert process.poll() is None, f"the run ended before {text!r}\n{log.read_text()[-4000:]}"
        assert time.monotonic() < deadline, f"{text!r} did not come within {timeout_s} s\n{log.read_text()[-4000:]}"
        time.sleep(0.05)


def rows(run_dir: Path, kind: str) -> list[dict]:
    """The rows of metrics.jsonl of one kind: train, eval or sync."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def trajectories(run_dir: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "trajectories" / f"{name}.jsonl").read_text().splitlines()]


def evaluated(run_dir: Path, step: int, dataset: str = "heldout") -> list[dict]:
    """Every sample of an evaluation."""
    path = run_dir / "evaluations" / f"step_{step:06d}" / f"{dataset}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def processes_of(log: Path) -> list[str]:
    """Command lines of the living processes that the command with this log started, itself included."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(log) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()) or process.name())
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


def wait_alive(process: subprocess.Popen, log: Path, *names: str, timeout_s: float = 600) -> None:
    """Until each of `names`, patterns, is in the command line of a process that `assert_nothing_left` would see."""
    deadline, alive = time.monotonic() + timeout_s, processes_of(log)
    while not all(any(re.search(name, command) for command in alive) for name in names):
        assert process.poll() is None, f"the run ended before all of {names} were there\n{log.read_text()[-4000:]}"
        assert time.monotonic() < deadline, f"not all of {names} came within {timeout_s} s: {alive}"
        time.sleep(0.2)
        alive = processes_of(log)


def assert_nothing_left(log: Path) -> None:
    deadline = time.monotonic() + 300
    while (left := processes_of(log)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left, f"still running: {left}"
