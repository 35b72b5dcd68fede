"""Runs a script of the tests on several ranks, in processes of their own, as torchrun would.

A rank's imports take longer than what most tests ask of it, so they happen once: the ranks of all tests are forked from
a process that has done little else. That the trainers start under torchrun itself is what tests/e2e shows.
"""
from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import time
import warnings
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
IMPORTED = ["tests.trainer.run_training", "tests.stream.push_toys"]
"""Between them, these import what is slow to import."""


def torchrun(script: Path, ranks: int, *args: str | Path, timeout_s: float = 1500.0, gpus: bool = False) -> str:
    """Output of `script` on `ranks` processes, which see no GPU unless `gpus`. AssertionError with the end of the
    output when one of them fails, or not all have ended in time."""
    # What has loaded CUDA cannot be forked.
    context = multiprocessing.get_context("spawn" if gpus else "forkserver")
    context.set_forkserver_preload(IMPORTED)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCHELASTIC_USE_AGENT_STORE": "True",
           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks),
           "LOCAL_WORLD_SIZE": str(ranks), "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    env |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if gpus else {"CUDA_VISIBLE_DEVICES": ""}
    with TemporaryDirectory() as folder, mock.patch.dict(os.environ, env):
        output = Path(folder) / "output"
        output.touch()
        processes = [context.Process(target=run_rank, args=(script, args, output, {
            **env, "RANK": str(rank), "LOCAL_RANK": str(rank)})) for rank in range(ranks)]
        try:
            for process in processes:
                process.start()
            failed = wait_for(processes, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
        text = output.read_text()
    assert not failed, f"{script.name} on {ranks} ranks: {failed}\n{text[-6000:]}"
    return text


def wait_for(processes: list[BaseProcess], deadline: float) -> str:
    """Until all have ended well, or one has not, or the deadline; why it was not well."""
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    while running:
        ended = wait(list(running), max(0.0, deadline - time.monotonic()))
        if not ended:
            return f"ranks {sorted(running.values())} had not ended in time"
        for rank in map(running.pop, ended):
            if code := processes[rank].exitcode:
                return f"rank {rank} ended with exit code {code}"
    return ""


def run_rank(script: Path, args: tuple[str | Path, ...], output: Path, env: dict[str, str]) -> None:
    """What a process does that is a rank."""
    os.environ.clear()
    os.environ.update(env)
    with open(output, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sys.argv = [str(script), *map(str, args)]
    runpy.run_path(str(script), run_name="__main__")
