"""The interface of a platform and the choice of one. No Megatron, no distributed state."""
from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch

Device = Literal["auto", "cpu", "cuda"]


class Platform(ABC):
    """One kind of device. Everything that asks "CPU or GPU?" asks here."""

    name: str
    """"cpu" or "cuda"."""
    backend: str
    """torch.distributed backend: "gloo" or "nccl"."""
    uses_te: bool
    """Whether trainers build Transformer Engine layers. It decides parameter names and the packed-attention kernel."""

    @abstractmethod
    def device(self) -> torch.device:
        """The device of this process."""

    @abstractmethod
    def set_device(self, local_rank: int) -> None:
        """Choose the device of this process. Must come before any tensor is made and before the process group."""

    @abstractmethod
    def install(self) -> None:
        """Prepare the process for Megatron. Must come before the first import of megatron; idempotent."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all work queued on the device is done."""

    @abstractmethod
    def memory(self) -> dict[str, float]:
        """Memory now and at its peak, in GiB: {"allocated": …, "peak": …}."""

    @abstractmethod
    def start_peak(self) -> None:
        """Have `memory` tell of the peak since this call."""

    @abstractmethod
    def used_beside(self) -> int:
        """Bytes in use on this process's device that no tensor of its own can take: by other processes, and by this
        one's context and libraries."""

    @abstractmethod
    def release_cache(self) -> None:
        """Give memory that no tensor uses any more back to the device, for other processes."""

    @abstractmethod
    def host_buffer(self, like: torch.Tensor) -> torch.Tensor:
        """An uninitialised host tensor of the same shape and dtype, page-locked where that makes copies faster."""

    @abstractmethod
    def rng_state(self) -> torch.Tensor:
        """State of the device's default generator: uint8 tensor on the host."""

    @abstractmethod
    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore what `rng_state` returned."""


def get_platform(device: Device = "auto") -> Platform:
    """The platform for `cluster.device`.

    Raises:
        RuntimeError: "cuda" was asked for and no GPU is visible.
        ValueError: unknown name.
    """
    from mrl.platform.cpu import CpuPlatform
    from mrl.platform.cuda import CudaPlatform

    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"cluster.device is {device!r}; allowed: auto, cpu, cuda")
    visible = torch.cuda.is_available()
    if device == "cuda" and not visible:
        raise RuntimeError("cluster.device is 'cuda' but no GPU is visible; check CUDA_VISIBLE_DEVICES and the driver, "
                           "or set cluster.device=cpu")
    return CudaPlatform() if device == "cuda" or (device == "auto" and visible) else CpuPlatform()
