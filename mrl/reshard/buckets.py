"""The words of a sync plan: parts of tensors in slices of buckets, and what every rank contributes. Data only."""
from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal, Mapping

from mrl.reshard.pieces import Box, Piece, Shape

WEIGHT_DTYPES = ("float32", "bfloat16", "float16")
"""In which weights train."""
BYTES = "uint8"
"""The dtype of a bucket whose parts have dtypes of their own."""
DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, BYTES: 1}

Mode = Literal["broadcast", "slices", "direct"]


@dataclass(frozen=True, slots=True)
class Part:
    """A box of the HF tensor `name` of shape `shape`: elements offset … offset + numel of its slice, row-major.

    `dtype`: None, that of its bucket; else `offset` is in bytes.
    """

    name: str
    shape: Shape
    box: Box
    offset: int
    dtype: str | None = None

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
    """What one rank gathers and sends at once: parts one behind the other, `numel` elements.

    `sent`: elements of its bucket's dtype that travel to the engine. They are the same ones, unless the bucket is fp8;
    then they are bytes, and their layout is in `fp8.py`.
    `ranks`: the global trainer ranks that hold its elements between them; `sender` is one of them, or comes last and
    holds none. Rank `ranks[m]` packs the pieces of `shards[m]` in that order, each row-major over `piece.shape`,
    without gaps; the packed lengths may differ, and be 0. With one rank there is nothing to gather. A slice with no
    elements is neither gathered nor sent.
    """

    numel: int
    sent: int
    parts: tuple[Part, ...]
    ranks: tuple[int, ...]
    sender: int
    shards: tuple[tuple[Contribution, ...], ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """One flat message. Slice s lies at s * slice_numel of it. `held`: the dtype of the parameters behind it, in which
    slices are gathered; `dtype`: the one it is sent in, the same one or BYTES for blockwise fp8.

    mode
        broadcast   one slice: its sender broadcasts it to all workers of each of `engines`
        slices      n slices, n = `EngineLayout.node`: slice s goes from its sender to the workers s, s + n, s + 2n, …;
                    then the n workers of each node all-gather in place
        direct      one slice of one rank, to `worker` alone

    Only the `sent` elements of a slice travel to the engine; the all-gather moves `slice_numel` of each.
    Buckets that do not broadcast have a single engine.
    """

    index: int
    dtype: str
    held: str
    mode: Mode
    engines: tuple[int, ...]
    worker: int | None
    slices: tuple[Slice, ...]

    @property
    def fp8(self) -> bool:
        """Whether it is quantised before it is sent."""
        return self.dtype == BYTES

    @property
    def slice_numel(self) -> int:
        """Elements of the largest slice, as they are sent."""
        return max(one.sent for one in self.slices)

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
    """A slice without its contents: bytes that are sent and that are gathered, the ranks that hold them, and the one
    that sends them."""

    nbytes: int
    gathered: int
    ranks: tuple[int, ...]
    sender: int


@dataclass(frozen=True, slots=True)
class Outline:
    """A bucket without its contents. `stage`: the pipeline stage whose ranks give it."""

    index: int
    dtype: str
    mode: Mode
    engines: tuple[int, ...]
    worker: int | None
    stage: int
    slices: tuple[SliceOutline, ...]
