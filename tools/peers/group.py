"""What both Pythons, the trainer's and the engine's, need for the comparisons: torch alone."""
from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=600)


def join_group(name: str, backend: str, host: str, port: int, rank: int, world_size: int) -> dist.ProcessGroup:
    """A process group beside torch's default one: the trainer, which serves a store at host:port, is rank 0."""
    store = dist.PrefixStore(name, dist.TCPStore(host, port, is_master=False, timeout=TIMEOUT))
    if backend == "nccl":
        return dist.ProcessGroupNCCL(store, rank, world_size)
    return dist.ProcessGroupGloo(store, rank, world_size, TIMEOUT)


def backend_of(device: torch.device) -> str:
    """Of a group that passes on what lies on `device`."""
    return "nccl" if device.type == "cuda" else "gloo"


def finish(device: torch.device) -> None:
    """Wait for all that `device` has been given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
