"""Many copies between tensors as few: worked out once for a bucket, and repeated in every sync.

A model may have 18,000 HF tensors, so that what a copy costs the host counts. Neighbours that stay neighbours become
one copy (a stacked parameter of experts, fused projections). What remains is handed to the GPU in two ways: large
contiguous pieces one by one, because the driver's own copy runs at the speed of the memory, and torch's kernel for many
copies at half of that; all others as a whole, which that kernel does at once if both sides of each are laid out alike.
"""
from __future__ import annotations

from itertools import product
from math import prod
from typing import Iterable, Iterator, NamedTuple, Optional

import torch

SLAB_BYTES = 64 << 10
"""Pairs that are not contiguous are cut into contiguous ones of at least this size; smaller ones would be too many."""
ALONE_BYTES = 12 << 20
"""From here on a contiguous copy is made by itself. Of smaller ones the host cannot start as many as the GPU can do: on
an H200 it takes 11 us to start one, in which torch's kernel for many copies does 9 MiB. So the two are equal there, and
from 12 MiB on (1.2 TB/s beside 0.9) it is worth one call more."""


def unattached(view: torch.Tensor) -> torch.Tensor:
    """The view without what it is a view of: else that would keep its memory when the view is given other memory."""
    return view.data


class _Run(NamedTuple):
    """Contiguous elements of one storage."""

    tensor: torch.Tensor
    start: int
    numel: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Run:
        return cls(tensor, tensor.storage_offset(), tensor.numel())

    def goes_on_in(self, other: _Run) -> bool:
        same = self.tensor.untyped_storage()._cdata == other.tensor.untyped_storage()._cdata
        return same and self.start + self.numel == other.start

    def with_next(self, other: _Run) -> _Run:
        return _Run(self.tensor, self.start, self.numel + other.numel)

    @property
    def view(self) -> torch.Tensor:
        return unattached(self.tensor.as_strided((self.numel,), (1,), self.start))


class Copies:
    """Copies of every source into its target, given as pairs (source, target) of equal shapes. No two targets overlap.

    The tensors' memory is what counts: whatever it holds at the time is copied.
    """

    def __init__(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]):
        alike: dict[torch.dtype, list[tuple[_Run, _Run]]] = {}
        self.alone: list[tuple[torch.Tensor, torch.Tensor]] = []  # (source, target)
        self.groups: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []  # (sources, targets)
        others: list[tuple[torch.Tensor, torch.Tensor]] = []
        for source, target in pairs:
            slabs = _slabs(source.detach(), target.detach())
            if slabs is None:
                others.append((unattached(source), target))
                continue
            runs = alike.setdefault(source.dtype, [])
            for one, other in slabs:
                _append(runs, _Run.of(one), _Run.of(other))
        for runs in alike.values():
            views = [(source.view, target.view) for source, target in runs]
            self.alone += [pair for pair in views if pair[0].nbytes >= ALONE_BYTES]
            self._group([pair for pair in views if pair[0].nbytes < ALONE_BYTES])
        self._group(others)

    def _group(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        if pairs:
            self.groups.append(([source for source, _ in pairs], [target for _, target in pairs]))

    @property
    def count(self) -> int:
        """Copies that are left."""
        return len(self.alone) + sum(len(sources) for sources, _ in self.groups)

    @property
    def sources(self) -> list[torch.Tensor]:
        """The tensors that `run` reads. They may be given other memory."""
        return [source for source, _ in self.alone] + [source for sources, _ in self.groups for source in sources]

    @torch.no_grad()
    def run(self) -> None:
        """Queue all copies on the current stream."""
        for source, target in self.alone:
            target.copy_(source, non_blocking=True)
        for sources, targets in self.groups:
            torch._foreach_copy_(targets, sources)


def _append(runs: list[tuple[_Run, _Run]], source: _Run, target: _Run) -> None:
    if runs and runs[-1][0].goes_on_in(source) and runs[-1][1].goes_on_in(target):
        before = runs.pop()
        source, target = before[0].with_next(source), before[1].with_next(target)
    runs.append((source, target))


def _slabs(source: torch.Tensor, target: torch.Tensor) -> Optional[Iterator[tuple[torch.Tensor, torch.Tensor]]]:
    """The pair, cut along its first dimensions, as contiguous pairs in order. None: they would be too small, or are of
    different dtypes."""
    if source.dtype != target.dtype:
        return None
    cut = max(_first_contiguous(source), _first_contiguous(target))
    if cut and prod(source.shape[cut:]) * source.itemsize < SLAB_BYTES:
        return None
    return ((source[index], target[index]) for index in product(*map(range, source.shape[:cut])))


def _first_contiguous(tensor: torch.Tensor) -> int:
    """The first dimension from which on a tensor lies row by row without gaps."""
    step = 1
    for dimension in reversed(range(tensor.dim())):
        if tensor.shape[dimension] != 1 and tensor.stride(dimension) != step:
            return dimension + 1
        step *= tensor.shape[dimension]
    return 0
