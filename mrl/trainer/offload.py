"""Gives up the device memory of a model while it is idle: weights and optimizer state wait in host memory.

Tensors stay the objects they are, in Megatron and in the optimizer: only the memory behind them goes and comes.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Iterable, Iterator

import torch

from mrl.platform import Platform

if TYPE_CHECKING:
    from mrl.trainer.trained_model import TrainedModel


class Offload:
    """Of one model, whose memory is on the device when this is made. Costs one host copy (page-locked on GPUs)."""

    def __init__(self, model: TrainedModel, platform: Platform) -> None:
        self._model, self._platform = model, platform
        self._host: list[torch.Tensor] = []
        self._away: list[tuple[torch.UntypedStorage, int]] = []

    def release(self) -> None:
        """Take everything off the device. Gradients are forgotten."""
        kept = list(_storages(self._state()))
        for index, storage in enumerate(kept):
            content = _bytes(storage)
            if index == len(self._host):
                self._host.append(self._platform.host_buffer(content))
            elif len(self._host[index]) != len(content):
                self._host[index] = self._platform.host_buffer(content)
            self._host[index].copy_(content, non_blocking=True)
        self._platform.synchronize()
        self._away = [(storage, storage.nbytes()) for storage in (*kept, *_storages(self._gradients()))]
        for storage, _ in self._away:
            storage.resize_(0)

    def restore(self) -> None:
        """Put everything back as it was, gradients excepted, whose memory holds anything."""
        for storage, size in self._away:
            storage.resize_(size)
        for (storage, _), host in zip(self._away, self._host):
            _bytes(storage).copy_(host, non_blocking=True)
        self._platform.synchronize()
        self._away = []

    def _state(self) -> Iterator[torch.Tensor]:
        """Weights, then masters, then moments, which are not there before the first step."""
        yield from (buffer.param_data for buffer in self._buffers())
        inner = self._model.optimizer.inner
        yield from (param for optimizer in inner for group in optimizer.param_groups for param in group["params"])
        kind = self._platform.device().type  # torch's Adam counts its steps on the host
        yield from (value for optimizer in inner for state in optimizer.state.values() for value in state.values()
                    if torch.is_tensor(value) and value.device.type == kind)

    def _gradients(self) -> Iterator[torch.Tensor]:
        return (buffer.grad_data for buffer in self._buffers())

    def _buffers(self) -> Iterator:
        """Megatron's flat buffers of weights and gradients."""
        return (buffer for chunk in self._model.chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers)


def _storages(tensors: Iterable[torch.Tensor]) -> Iterator[torch.UntypedStorage]:
    """The device memory behind the tensors, each piece once."""
    seen: set[int] = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """uint8 [n], the memory itself."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
