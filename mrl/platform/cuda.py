"""NVIDIA GPUs: NCCL, Transformer Engine layers when it is installed."""
from __future__ import annotations

import importlib.util

import torch

from mrl.platform.base import Platform


class CudaPlatform(Platform):
    """One GPU per process."""

    name = "cuda"
    backend = "nccl"

    def __init__(self) -> None:
        # The PyTorch half is a package of its own: the name `transformer_engine` alone may be importable without it.
        self.uses_te = all(importlib.util.find_spec(m) is not None
                           for m in ("transformer_engine", "transformer_engine_torch"))

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

    def host_buffer(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)

    def rng_state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state)
