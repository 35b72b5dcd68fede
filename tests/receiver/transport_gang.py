"""Starts the ranks of `transport_peer.py` around a store in this process."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Optional

import torch.distributed as dist

from mrl.receiver.mrl_receiver.links import failed_key
from tests.torchrun import ROOT

PEER = Path(__file__).with_name("transport_peer.py")


def run(transport: str, world: int, *scenarios: str, gpus: Optional[list[int]] = None,
        timeout_s: float = 300.0) -> list[dict]:
    """By rank, what it says of each scenario, by name; a killed rank says nothing of the last. gpus: by rank, the one
    that it sees."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = []
    try:
        for rank in range(world):
            env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
                   "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": str(gpus[rank]) if gpus else ""}
            ranks.append(subprocess.Popen(
                [sys.executable, str(PEER), transport, str(rank), str(world), str(store.port), ",".join(scenarios)],
                env=env, cwd=ROOT, text=True, stdout=subprocess.PIPE))
        if "lose" in scenarios and transport == "nccl":  # which does not notice by itself; the trainers' rank 0 says so
            ranks[-1].wait(timeout_s)
            store.set(failed_key("link/lose"), "1")
        said = [rank.communicate(timeout=timeout_s)[0].splitlines() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [dict(zip(scenarios, map(json.loads, lines))) for lines in said]
