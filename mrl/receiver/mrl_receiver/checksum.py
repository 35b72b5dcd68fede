"""The checksum of a tensor: Σ word_w · (2w+1) mod 2^64 over its words of 64 bits.

Word w holds the elements wk … wk+k-1 of the whole HF tensor in row-major order, k = 8 / bytes of an element, the first
in its lowest bits; the last word may lack some. The sum is kept as a signed 64-bit integer, so that it fits a
torch.int64 and any wire.

Weighted by position, so a transpose or two swapped rows change it; odd weights, so every bit of every element counts;
a plain sum over elements, so the sums of disjoint shards add up to that of the whole. The weight of an element is a
sum of one term for each of its indices: sums over all other dimensions are all that is needed of a tensor, and those
read it in whole words.
"""
from __future__ import annotations

from typing import Iterable, Iterator

import torch

from .wire import Lattice, row_major

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
    taken one by one, and need memory for about CHUNK_ELEMENTS elements at most beside them.
    """
    terms, owners, count = _Terms(), [], 0
    for count, (values, (start, shape, strides)) in enumerate(blocks, 1):
        if tuple(values.shape) != tuple(shape):
            raise ValueError(f"values of shape {tuple(values.shape)} are not the lattice's {tuple(shape)}")
        if values.numel():
            known = len(terms)
            _collect(terms, values.reshape(shape or (1,)), start, tuple(strides) or (1,))
            owners += [count - 1] * (len(terms) - known)
    sums = [0] * count
    for owner, term in zip(owners, terms.totals(), strict=True):
        sums[owner] = add(sums[owner], term)
    return sums


def whole(shape: tuple[int, ...]) -> Lattice:
    """The lattice of a whole row-major tensor."""
    return 0, tuple(shape), row_major(shape)


def add(first: int, second: int) -> int:
    """The checksum of the union of two disjoint blocks."""
    return (first + second + (1 << 63)) % (1 << 64) - (1 << 63)


class _Terms:
    """Vectors of 64-bit integers, each with weights first, first + step, first + 2 step …"""

    def __init__(self) -> None:
        self.vectors: list[torch.Tensor] = []
        self.weights: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self.vectors)

    def add(self, vector: torch.Tensor, first: int, step: int) -> None:
        self.vectors.append(vector)
        self.weights.append((first, step))

    def totals(self) -> list[int]:
        """The weighted sum of each vector, mod 2^64 and signed: what torch makes of an overflow."""
        if not self.vectors:
            return []
        device = self.vectors[0].device
        sizes = torch.tensor([len(vector) for vector in self.vectors])
        ends = sizes.cumsum(0)
        table = torch.cat([torch.tensor(self.weights), torch.stack([ends - sizes, ends - 1], 1)], 1).to(device)
        first, step, begins, lasts = table.unbind(1)
        flat = torch.cat(self.vectors)
        owner = torch.repeat_interleave(sizes.to(device), output_size=len(flat))
        place = torch.arange(len(flat), device=device) - begins[owner]
        running = (flat * (first[owner] + step[owner] * place)).cumsum(0)[lasts]
        return running.diff(prepend=running.new_zeros(1)).tolist()


def _collect(terms: _Terms, values: torch.Tensor, start: int, strides: tuple[int, ...]) -> None:
    """The terms of a block of one dimension or more, which begins with element `start` of its HF tensor."""
    lanes = WORD_BYTES // values.element_size()
    aligned = strides[-1] == 1 and not any(number % lanes for number in (start, values.shape[-1], *strides[:-1]))
    if aligned and _in_words(values, lanes):
        words, start = values.view(torch.int64), start // lanes
        rows = len(words) // ROW_WORDS if words.dim() == 1 else 0
        if rows:
            _marginals(terms, words[:rows * ROW_WORDS].view(rows, ROW_WORDS), start, (ROW_WORDS, 1))
            words, start = words[rows * ROW_WORDS:], start + rows * ROW_WORDS
        _marginals(terms, words, start, (*(stride // lanes for stride in strides[:-1]), 1))
    elif values.numel() > CHUNK_ELEMENTS and values.shape[0] > 1:
        for low, high in _halves(values.shape[0]):
            _collect(terms, values[low:high], start + low * strides[0], strides)
    elif aligned:
        _collect(terms, values.clone(memory_format=torch.contiguous_format), start, strides)
    else:
        terms.add(_elementwise(values, start, strides, lanes).view(1), 1, 0)


def _in_words(values: torch.Tensor, lanes: int) -> bool:
    """Whether the memory can be read in words."""
    return (values.stride(-1) == 1 and values.data_ptr() % WORD_BYTES == 0
            and not any(stride % lanes for stride in values.stride()[:-1]))


def _marginals(terms: _Terms, words: torch.Tensor, start: int, strides: tuple[int, ...]) -> None:
    """Of words[i, j, …], with weight 2 (start + i strides[0] + j strides[1] + …) + 1: the sums over all dimensions but
    one, for every one of them."""
    first = 2 * start + 1
    for dimension, stride in enumerate(strides):
        others = [other for other in range(words.dim()) if other != dimension]
        terms.add(words.sum(others) if others else words, first, 2 * stride)
        first = 0


def _halves(rows: int) -> Iterator[tuple[int, int]]:
    yield 0, rows // 2
    yield rows // 2, rows


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
