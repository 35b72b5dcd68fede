"""The checksum of a tensor: Σ bits(x_i)·(2i+1) mod 2^64, with i the row-major index in the whole HF tensor.

Kept as a signed 64-bit integer, so that it fits a torch.int64 and any wire.

Weighted by position, so a transpose or two swapped rows change it; odd weights, so every bit of every element counts;
a plain sum over elements, so the sums of disjoint shards add up to that of the whole.
"""
from __future__ import annotations

import torch

from .wire import Lattice, row_major

CHUNK_ELEMENTS = 1 << 22
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(values: torch.Tensor, lattice: Lattice) -> int:
    """The sum over a block of elements of an HF tensor.

    values: any dtype and strides; lattice: which elements they are, its shape equal to that of `values`. Works in
    pieces of at most about CHUNK_ELEMENTS elements, so it needs little memory beside the tensor.
    """
    start, shape, strides = lattice
    if tuple(values.shape) != tuple(shape):
        raise ValueError(f"values of shape {tuple(values.shape)} are not the lattice's {tuple(shape)}")
    return _signed(_sum(values, start, strides))


def whole(shape: tuple[int, ...]) -> Lattice:
    """The lattice of a whole row-major tensor."""
    return 0, tuple(shape), row_major(shape)


def add(first: int, second: int) -> int:
    """The checksum of the union of two disjoint blocks."""
    return _signed(first + second)


def _signed(number: int) -> int:
    """`number` mod 2^64, in -2^63 … 2^63-1."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _sum(values: torch.Tensor, start: int, strides: tuple[int, ...]) -> int:
    if values.numel() > CHUNK_ELEMENTS and values.dim():
        rows = max(1, CHUNK_ELEMENTS * values.shape[0] // values.numel())
        if rows < values.shape[0]:
            return sum(_sum(values[row:row + rows], start + row * strides[0], strides)
                       for row in range(0, values.shape[0], rows))
        if values.shape[0] == 1:
            return _sum(values[0], start, strides[1:])
    bits = values.contiguous().view(_BITS[values.element_size()]).to(torch.int64)
    weights = torch.full((), 2 * start + 1, dtype=torch.int64, device=values.device)
    for dimension, (size, stride) in enumerate(zip(values.shape, strides)):
        index = torch.arange(size, dtype=torch.int64, device=values.device) * (2 * stride)
        weights = weights + index.view(-1, *[1] * (values.dim() - dimension - 1))
    return int((bits * weights).sum())  # int64 wraps around: arithmetic mod 2^64
