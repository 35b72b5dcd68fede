"""Gives up the device memory of a model while it is idle: weights and optimizer state wait in host memory.

Tensors stay the objects they are, in Megatron and in the optimizer: only the memory behind them goes and comes.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Callable, Iterable, Iterator, Literal

import torch

from mrl.platform import Platform

if TYPE_CHECKING:
    from mrl.trainer.trained_model import TrainedModel

Part = Literal["weights", "optimizer"]
CHUNK = 1 << 30
"""Bytes of one host buffer at most. Page-locked memory comes in powers of two: a buffer for each tensor would waste up
to half of it, and so would one for all."""


class Offload:
    """Of one model, whose memory is on the device when this is made. Costs one host copy (page-locked on GPUs), made
    when a part is first released.

    The parts are "weights", and "optimizer": masters, moments and gradients. Gradients are forgotten.
    """

    def __init__(self, model: TrainedModel, platform: Platform) -> None:
        self._model = model
        self._parts: dict[Part, _Away] = {
            "weights": _Away(platform, self._weights, lambda: ()),
            "optimizer": _Away(platform, self._optimizer, self._gradients)}

    def release(self, *parts: Part) -> int:
        """Take the parts off the device, all if none is named. Returns the bytes copied: 0 of what is away already."""
        return sum(self._parts[part].release() for part in parts or self._parts)

    def restore(self, *parts: Part) -> int:
        """Put the parts back as they were, but gradients, whose memory holds anything. Returns the bytes copied."""
        return sum(self._parts[part].restore() for part in parts or self._parts)

    def _weights(self) -> Iterator[torch.Tensor]:
        yield from (buffer.param_data for buffer in self._buffers())
        yield from self._model.local_params().values()

    def _optimizer(self) -> Iterator[torch.Tensor]:
        """Masters, then moments, which are not there before the first step. Masters of fp32 models are weights.

        Nothing of an optimizer that is on the host.
        """
        if self._model.optimizer.on_host:
            return
        weights = {_identity(tensor) for tensor in self._weights()}
        inner = self._model.optimizer.inner
        masters = (param for optimizer in inner for group in optimizer.param_groups for param in group["params"])
        yield from (master for master in masters if _identity(master) not in weights)
        kind = next(self._weights()).device.type  # torch's Adam counts its steps on the host
        yield from (value for optimizer in inner for state in optimizer.state.values() for value in state.values()
                    if torch.is_tensor(value) and value.device.type == kind)

    def _gradients(self) -> Iterator[torch.Tensor]:
        return (buffer.grad_data for buffer in self._buffers())

    def _buffers(self) -> Iterator:
        """Megatron's flat buffers of weights and gradients."""
        return (buffer for chunk in self._model.chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers)


class _Away:
    """One part: `kept` are the tensors whose content waits on the host, `forgotten` those whose content does not."""

    def __init__(self, platform: Platform, kept: Callable[[], Iterable[torch.Tensor]],
                 forgotten: Callable[[], Iterable[torch.Tensor]]) -> None:
        self.platform, self.kept, self.forgotten = platform, kept, forgotten
        self.room: list[torch.Tensor] = []  # on the host, filled one after the other
        self.away: list[tuple[torch.UntypedStorage, int, list[torch.Tensor]]] = []

    def release(self) -> int:
        if self.away:
            return 0
        kept = list(_storages(self.kept()))
        for storage, pieces in zip(kept, self._places([storage.nbytes() for storage in kept])):
            _copy(pieces, _cut(storage, pieces))
            self.away.append((storage, storage.nbytes(), pieces))
        self.platform.synchronize()
        self.away += [(storage, storage.nbytes(), []) for storage in _storages(self.forgotten())]
        for storage, _, _ in self.away:
            storage.resize_(0)
        return sum(size for _, size, pieces in self.away if pieces)

    def restore(self) -> int:
        away, self.away = self.away, []
        for storage, size, _ in away:
            storage.resize_(size)
        for storage, _, pieces in away:
            if pieces:
                _copy(_cut(storage, pieces), pieces)
        self.platform.synchronize()
        return sum(size for _, size, pieces in away if pieces)

    def _places(self, sizes: list[int]) -> Iterator[list[torch.Tensor]]:
        """Host memory for so many bytes each, in pieces where a chunk ends; there is always more room if needed."""
        while (missing := sum(sizes) - sum(map(len, self.room))) > 0:
            like = torch.empty(min(missing, CHUNK), dtype=torch.uint8, device="meta")
            self.room.append(self.platform.host_buffer(like))
        rest = iter(self.room)
        chunk = next(rest, torch.empty(0, dtype=torch.uint8))
        for size in sizes:
            pieces = []
            while size:
                if not len(chunk):
                    chunk = next(rest)
                pieces.append(chunk[:size])
                size, chunk = size - len(pieces[-1]), chunk[len(pieces[-1]):]
            yield pieces


def _identity(tensor: torch.Tensor) -> int:
    """Of the memory behind a tensor, wherever that is."""
    return tensor.untyped_storage()._cdata


def _storages(tensors: Iterable[torch.Tensor]) -> Iterator[torch.UntypedStorage]:
    """The device memory behind the tensors, each piece once."""
    seen: set[int] = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage._cdata not in seen:
            seen.add(storage._cdata)
            yield storage


def _cut(storage: torch.UntypedStorage, pieces: list[torch.Tensor]) -> list[torch.Tensor]:
    """The memory itself, uint8, in pieces of those lengths."""
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return list(flat.split([len(piece) for piece in pieces]))


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
