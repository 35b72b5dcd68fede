"""The words of a sync plan: parts of tensors in slices of buckets, and what every rank contributes. Data only."""
from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal, Mapping

from mrl.reshard.pieces import Box, Piece, Shape

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}

Mode = Literal["broadcast", "slices", "direct"]


@dataclass(frozen=True, slots=True)
class Part:
    """A box of the HF tensor `name` of shape `shape`: elements offset … offset + numel of its slice, row-major."""

    name: str
    shape: Shape
    box: Box
    offset: int

    @property
    def box_shape(self) -> Shape:
        """Sizes of the box."""
        return tuple(stop - start for start, stop in self.box)

    @property
    def numel(self) -> int:
        """Elements of the box."""
        return prod(self.box_shape)

    @property
    def whole(self) -> bool:
        """Whether the box is the tensor."""
        return self.box_shape == self.shape


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one rank gives from one of its parameters: `pieces` that all leave, each inside one part of the slice."""

    param: str
    param_shape: Shape
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        """Elements given."""
        return sum(piece.numel for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Slice:
    """What one rank sends at once: parts one behind the other, `numel` elements.

    `ranks`: the global trainer ranks that hold its elements between them; `sender` is one of them, or comes last and
    holds none. Rank `ranks[m]` packs the pieces of `shards[m]` in that order, each row-major over `piece.shape`,
    without gaps; the packed lengths may differ, and be 0. With one rank there is nothing to gather. A slice with no
    elements is neither gathered nor sent.
    """

    numel: int
    parts: tuple[Part, ...]
    ranks: tuple[int, ...]
    sender: int
    shards: tuple[tuple[Contribution, ...], ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """One flat message of one dtype. Slice s lies at s * slice_numel of it.

    mode
        broadcast   one slice: its sender broadcasts it to all workers of each of `engines`
        slices      n slices, n = `EngineLayout.node`: slice s goes from its sender to the workers s, s + n, s + 2n, …;
                    then the n workers of each node all-gather in place
        direct      one slice of one rank, to `worker` alone

    Only the `numel` elements of a slice travel to the engine; the all-gather moves `slice_numel` of each.
    Buckets that do not broadcast have a single engine.
    """

    index: int
    dtype: str
    mode: Mode
    engines: tuple[int, ...]
    worker: int | None
    slices: tuple[Slice, ...]

    @property
    def slice_numel(self) -> int:
        """Elements of the largest slice."""
        return max(one.numel for one in self.slices)

    @property
    def numel(self) -> int:
        """Elements of the flat bucket."""
        return len(self.slices) * self.slice_numel

    @property
    def nbytes(self) -> int:
        """Bytes of the flat bucket."""
        return self.numel * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class SliceOutline:
    """A slice without its contents: bytes, ranks that hold them, and the one that sends them."""

    nbytes: int
    ranks: tuple[int, ...]
    sender: int


@dataclass(frozen=True, slots=True)
class Outline:
    """A bucket without its contents. `stage`: the pipeline stage whose ranks give it."""

    index: int
    mode: Mode
    engines: tuple[int, ...]
    worker: int | None
    stage: int
    slices: tuple[SliceOutline, ...]
