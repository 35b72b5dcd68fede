"""NVIDIA GPUs: NCCL, Transformer Engine layers when it is installed."""
from __future__ import annotations

import importlib.metadata
import importlib.util

import torch

from mrl.platform.base import Platform


class CudaPlatform(Platform):
    """One GPU per process."""

    name = "cuda"
    backend = "nccl"

    def __init__(self) -> None:
        self.uses_te = importlib.util.find_spec("transformer_engine") is not None and _has_te_for_torch()

    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def set_device(self, local_rank: int) -> None:
        torch.cuda.set_device(local_rank)

    def install(self) -> None:
        """Megatron needs no preparation on GPUs."""

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def memory(self) -> dict[str, float]:
        return {"allocated": torch.cuda.memory_allocated() / 2**30, "peak": torch.cuda.max_memory_allocated() / 2**30}

    def start_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def used_beside(self) -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()

    def release_cache(self) -> None:
        torch.cuda.empty_cache()

    def host_buffer(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)

    def rng_state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state)


def _has_te_for_torch() -> bool:
    """Whether Transformer Engine's PyTorch half is there: a package of its own, without which the other is of no use.

    Built from source it is a module; from PyPI a library inside the other half, which only the metadata tell of.
    """
    if importlib.util.find_spec("transformer_engine_torch") is not None:
        return True
    try:
        importlib.metadata.distribution("transformer_engine_torch")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
