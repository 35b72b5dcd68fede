"""Weighted sums over blocks of 64-bit words, in two ways that agree bit for bit.

A block is a tensor words[i, j, …] of int64; the weight of a word is 2 (start + i strides[0] + j strides[1] + …) + 1,
and sums are mod 2^64. `Marginals` needs torch alone and reads every block once for each of its dimensions. `Tiles`
reads it once, in one kernel for many blocks: for GPUs, where torch has Triton.
"""
from __future__ import annotations

from itertools import product
from typing import Iterator, NamedTuple, Optional

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # torch's build for CPUs comes without it
    triton = None

FLUSH_WORDS = 1 << 28
"""So many words, 2 GiB, are handed to the kernel at once: what was made only to be summed is free again afterwards."""
LONGEST = 1 << 30
"""Words of one piece at most: inside a piece the kernel counts with 32 bits."""
TILE, STEP, WARPS = 1 << 14, 1 << 11, 8


class Marginals:
    """The weight is a sum of one term for each index, so the sums over all other dimensions are all that is needed."""

    def __init__(self, device: torch.device):
        self.device = device
        self.vectors: list[torch.Tensor] = []
        self.terms: list[tuple[int, int, int]] = []  # the block; weights first, first + step, first + 2 step …

    def add(self, block: int, words: torch.Tensor, start: int, strides: tuple[int, ...]) -> None:
        first = 2 * start + 1
        for dimension, stride in enumerate(strides):
            others = [other for other in range(words.dim()) if other != dimension]
            self.vectors.append(words.sum(others) if others else words)
            self.terms.append((block, first, 2 * stride))
            first = 0

    def totals(self) -> Iterator[tuple[int, int]]:
        """(block, signed sum) of every term."""
        if not self.vectors:
            return
        sizes = torch.tensor([len(vector) for vector in self.vectors])
        ends = sizes.cumsum(0)
        numbers = torch.tensor([term[1:] for term in self.terms])
        table = torch.cat([numbers, torch.stack([ends - sizes, ends - 1], 1)], 1).to(self.device)
        first, step, begins, lasts = table.unbind(1)
        flat = torch.cat(self.vectors)
        owner = torch.repeat_interleave(sizes.to(self.device), output_size=len(flat))
        place = torch.arange(len(flat), device=self.device) - begins[owner]
        running = (flat * (first[owner] + step[owner] * place)).cumsum(0)[lasts]
        for (block, _, _), total in zip(self.terms, running.diff(prepend=running.new_zeros(1)).tolist(), strict=True):
            yield block, total


class _Piece(NamedTuple):
    """Words in memory as rows of `columns`, `pitch` words apart; the first has weight `first`, the one below it `step`
    more, the one beside it 2 more. `tile` is the number of its first tile."""

    address: int
    size: int
    columns: int
    pitch: int
    first: int
    step: int
    tile: int


class Tiles:
    """Pieces of blocks are cut into tiles of TILE words, one for each program of the kernel, which finds out to which
    piece its tile belongs: a table of tiles would take the host longer than the sums take the GPU."""

    def __init__(self, device: torch.device):
        self.device = device
        self.blocks: list[int] = []
        self.pieces: list[_Piece] = []
        self.held: list[torch.Tensor] = []
        self.words = self.tiles = 0
        self.sums: list[torch.Tensor] = []

    def add(self, block: int, words: torch.Tensor, start: int, strides: tuple[int, ...]) -> None:
        for piece in _pieces(words, start, strides):
            self.blocks.append(block)
            self.pieces.append(_Piece(*piece, self.tiles))
            self.tiles += -(-self.pieces[-1].size // TILE)
        self.held.append(words)
        self.words += words.numel()
        if self.words >= FLUSH_WORDS:
            self._flush()

    def totals(self) -> Iterator[tuple[int, int]]:
        """(block, signed sum) of every piece."""
        self._flush()
        return zip(self.blocks, torch.cat(self.sums).tolist() if self.sums else [], strict=True)

    def _flush(self) -> None:
        if self.pieces:
            table = torch.tensor(self.pieces).to(self.device)
            sums = torch.zeros(len(self.pieces), dtype=torch.int64, device=self.device)
            _sum_tile[(self.tiles,)](table, len(self.pieces), sums, TILE=TILE, STEP=STEP, num_warps=WARPS)
            self.sums.append(sums)
        self.pieces, self.held, self.words, self.tiles = [], [], 0, 0


def adder(device: torch.device) -> Marginals | Tiles:
    """The faster one that there is for tensors on `device`."""
    return Tiles(device) if device.type == "cuda" and triton is not None else Marginals(device)


def _pieces(words: torch.Tensor, start: int, strides: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The block as rows, the fewest that there are: of each piece all but its tile."""
    axes: list[tuple[int, int, int]] = []  # size, words apart in memory, words apart in the HF tensor
    for size, apart, stride in zip(words.shape, words.stride(), strides):
        if axes and axes[-1][1:] == (size * apart, size * stride):
            axes[-1] = axes[-1][0] * size, apart, stride
        elif size > 1 or not axes:
            axes.append((size, apart, stride))
    if axes[-1][1:] != (1, 1):  # a single column, or a last dimension of size 1
        axes.append((1, 1, 1))
    (columns, _, _), row = axes[-1], axes[-2] if len(axes) > 1 else (1, 0, 0)
    for index in product(*(range(size) for size, _, _ in axes[:-2])):
        offset = sum(at * apart for at, (_, apart, _) in zip(index, axes))
        place = start + sum(at * stride for at, (_, _, stride) in zip(index, axes))
        rows = max(1, LONGEST // columns)
        for top in range(0, row[0], rows):
            for left in range(0, columns, LONGEST):
                width = min(LONGEST, columns - left)
                yield (words.data_ptr() + 8 * (offset + top * row[1] + left),
                       min(rows, row[0] - top) * width, width, row[1],
                       2 * (place + top * row[2] + left) + 1, 2 * row[2])


def _kernel(table, pieces, sums, TILE: tl.constexpr, STEP: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    number, end = tile * 0, tile * 0 + pieces
    while end - number > 1:
        middle = (number + end) // 2
        before = tl.load(table + 7 * middle + 6) <= tile
        number, end = tl.where(before, middle, number), tl.where(before, end, middle)
    piece = table + 7 * number
    begin = (tile - tl.load(piece + 6)) * TILE
    words = tl.load(piece).to(tl.pointer_type(tl.int64))
    size, columns, pitch = tl.load(piece + 1), tl.load(piece + 2), tl.load(piece + 3)
    first, step = tl.load(piece + 4), tl.load(piece + 5)
    row = begin // columns
    words += row * pitch
    first += row * step
    within, width, left = (begin - row * columns).to(tl.int32), columns.to(tl.int32), size - begin
    total = tl.zeros([STEP], dtype=tl.int64)
    for offset in range(0, TILE, STEP):
        count = offset + tl.arange(0, STEP)
        down = (within + count) // width
        right = within + count - down * width
        value = tl.load(words + down.to(tl.int64) * pitch + right, mask=count < left, other=0)
        total += value * (first + down.to(tl.int64) * step + 2 * right.to(tl.int64))
    tl.atomic_add(sums + number, tl.sum(total, 0))


_sum_tile: Optional[object] = triton.jit(_kernel, do_not_specialize=["pieces"]) if triton is not None else None
