"""The ranks of a benchmark under torchrun: torch's process group of all of them, and a folder that they share."""
from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

import torch.distributed as dist

from mrl.platform import Platform, get_platform


@contextmanager
def gang(device: str) -> Iterator[Platform]:
    """Within the block this process is a rank on its own device, "cpu", "cuda" or "auto", ready for Megatron."""
    platform = get_platform(device)
    platform.set_device(int(os.environ["LOCAL_RANK"]))
    platform.install()
    dist.init_process_group(platform.backend)
    try:
        yield platform
    finally:
        dist.destroy_process_group()


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A temporary folder of rank 0 that all ranks of the machine see. Collective."""
    with tempfile.TemporaryDirectory() as own:
        place = [own]
        dist.broadcast_object_list(place)
        yield Path(place[0])
        dist.barrier()
