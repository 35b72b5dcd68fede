"""The checksum of a tensor: Σ word_w · (2w+1) mod 2^64 over its words of 64 bits.

Word w holds the elements wk … wk+k-1 of the whole HF tensor in row-major order, k = 8 / bytes of an element, the first
in its lowest bits; the last word may lack some. The sum is kept as a signed 64-bit integer, so that it fits a
torch.int64 and any wire.

Weighted by position, so a transpose or two swapped rows change it; odd weights, so every bit of every element counts;
a plain sum over elements, so the sums of disjoint shards add up to that of the whole.
"""
from __future__ import annotations

from typing import Iterable, Optional

import torch

from .wire import Lattice, row_major
from .word_sums import Marginals, Tiles, adder

CHUNK_ELEMENTS = 1 << 22
ROW_WORDS = 1 << 12
"""A long vector is read as a matrix with rows of this length."""
WORD_BYTES = 8
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(values: torch.Tensor, lattice: Lattice) -> int:
    """The sum over one block of elements of an HF tensor; see `checksums`."""
    return checksums([(values, lattice)])[0]


def checksums(blocks: Iterable[tuple[torch.Tensor, Lattice]]) -> list[int]:
    """The sum over each block of elements of an HF tensor, all on one device, which is waited for once.

    values: any dtype and strides; lattice: which elements they are, its shape equal to that of `values`. Blocks are
    taken one by one, and need memory for a few GiB at most beside them, on the CPU for about CHUNK_ELEMENTS elements.
    """
    sums: list[int] = []
    words: Optional[Marginals | Tiles] = None
    for number, (values, (start, shape, strides)) in enumerate(blocks):
        if tuple(values.shape) != tuple(shape):
            raise ValueError(f"values of shape {tuple(values.shape)} are not the lattice's {tuple(shape)}")
        sums.append(0)
        if values.numel():
            words = words or adder(values.device)
            _collect(words, number, values.reshape(shape or (1,)), start, tuple(strides) or (1,))
    for number, total in words.totals() if words else ():
        sums[number] = add(sums[number], total)
    return sums


def whole(shape: tuple[int, ...]) -> Lattice:
    """The lattice of a whole row-major tensor."""
    return 0, tuple(shape), row_major(shape)


def add(first: int, second: int) -> int:
    """The checksum of the union of two disjoint blocks."""
    return (first + second + (1 << 63)) % (1 << 64) - (1 << 63)


def _collect(words: Marginals | Tiles, number: int, values: torch.Tensor, start: int, strides: tuple[int, ...]) -> None:
    """Add a block of one dimension or more, which begins with element `start` of its HF tensor."""
    lanes = WORD_BYTES // values.element_size()
    aligned = strides[-1] == 1 and not any(place % lanes for place in (start, values.shape[-1], *strides[:-1]))
    if aligned and _in_words(values, lanes):
        its, start = values.view(torch.int64), start // lanes
        rows = len(its) // ROW_WORDS if its.dim() == 1 else 0
        if rows:
            words.add(number, its[:rows * ROW_WORDS].view(rows, ROW_WORDS), start, (ROW_WORDS, 1))
            its, start = its[rows * ROW_WORDS:], start + rows * ROW_WORDS
        if its.numel():
            words.add(number, its, start, (*(stride // lanes for stride in strides[:-1]), 1))
    elif values.numel() > CHUNK_ELEMENTS and values.shape[0] > 1:
        middle = values.shape[0] // 2
        _collect(words, number, values[:middle], start, strides)
        _collect(words, number, values[middle:], start + middle * strides[0], strides)
    elif aligned:
        _collect(words, number, values.clone(memory_format=torch.contiguous_format), start, strides)
    else:  # as one word, of weight 1
        words.add(number, _elementwise(values, start, strides, lanes).view(1), 0, (1,))


def _in_words(values: torch.Tensor, lanes: int) -> bool:
    """Whether the memory can be read in words."""
    return (values.stride(-1) == 1 and values.data_ptr() % WORD_BYTES == 0
            and not any(stride % lanes for stride in values.stride()[:-1]))


def _elementwise(values: torch.Tensor, start: int, strides: tuple[int, ...], lanes: int) -> torch.Tensor:
    """The sum over a small block that does not consist of whole words: an int64 without dimensions."""
    size = values.element_size()
    bits = values.contiguous().view(_BITS[size]).to(torch.int64)
    if lanes > 1:
        bits = bits & ((1 << 8 * size) - 1)
    index = torch.full((), start, dtype=torch.int64, device=values.device)
    for dimension, (length, stride) in enumerate(zip(values.shape, strides)):
        along = torch.arange(length, dtype=torch.int64, device=values.device) * stride
        index = index + along.view(-1, *[1] * (values.dim() - dimension - 1))
    return ((bits << (8 * size) * (index % lanes)) * (2 * (index // lanes) + 1)).sum()
