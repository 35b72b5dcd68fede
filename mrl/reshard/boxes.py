"""Arithmetic of boxes: one (start, stop) for each dimension of a tensor."""
from __future__ import annotations

from math import prod
from typing import Sequence

from mrl.reshard.pieces import Box, Shape


def whole(shape: Shape) -> Box:
    """The box that is the tensor."""
    return tuple((0, size) for size in shape)


def sizes(box: Box) -> Shape:
    """Sizes of a box."""
    return tuple(stop - start for start, stop in box)


def numel(box: Box) -> int:
    """Elements of a box."""
    return prod(sizes(box))


def intersection(one: Box, other: Box) -> Box | None:
    """What two boxes of the same tensor share; None when that is nothing."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def within(inner: Box, outer: Box) -> bool:
    """Whether `outer` has all of `inner`."""
    return all(c <= a and b <= d for (a, b), (c, d) in zip(inner, outer, strict=True))


def hull(boxes: Sequence[Box]) -> Box:
    """The smallest box around all of `boxes`."""
    return tuple((min(start for start, _ in spans), max(stop for _, stop in spans)) for spans in zip(*boxes))


def cut(box: Box, elements: int, grain: int = 1) -> tuple[Box | None, Box | None]:
    """A box as its first rows, as many as `elements` have room for, and the rest; either is None when it is empty.

    Rows are `grain` wide, and of the first dimension that has more than one; `box` begins at multiples of it.
    """
    dim = _first_divisible(box, grain)
    if dim is None:
        return (box, None) if numel(box) <= elements else (None, box)
    start, stop = box[dim]
    middle = min(stop, start + elements // _row(box, dim, grain) * grain)

    def rows(low: int, high: int) -> Box | None:
        return (*box[:dim], (low, high), *box[dim + 1:]) if low < high else None

    return rows(start, middle), rows(middle, stop)


def pieces_of(box: Box, elements: int, grain: int = 1) -> list[Box]:
    """A box as consecutive boxes of at most `elements` each: ranges of rows, as in `cut`, of about the same size.

    Where one row is larger, it is cut in the same way; what is `grain` wide in every dimension is not.
    """
    dim = _first_divisible(box, grain)
    if numel(box) <= elements or dim is None:
        return [box]
    start, stop = box[dim]
    rows = -(-(stop - start) // grain)
    count = -(-rows // max(1, elements // _row(box, dim, grain)))
    edges = [*(start + rows * i // count * grain for i in range(count)), stop]
    ranges = [(*box[:dim], span, *box[dim + 1:]) for span in zip(edges, edges[1:])]
    return [piece for part in ranges for piece in pieces_of(part, elements, grain)]


def rows_below(box: Box, elements: int, grain: int = 1) -> list[Box]:
    """A box whose rows, as in `cut`, have at most `elements`, or its rows, taken apart until theirs have."""
    dim = _first_divisible(box, grain)
    if dim is None or _row(box, dim, grain) <= elements:
        return [box]
    start, stop = box[dim]
    rows = [(*box[:dim], (at, min(at + grain, stop)), *box[dim + 1:]) for at in range(start, stop, grain)]
    return [part for one in rows for part in rows_below(one, elements, grain)]


def _first_divisible(box: Box, grain: int) -> int | None:
    """The first dimension with more than one row."""
    return next((dim for dim, (start, stop) in enumerate(box) if stop - start > grain), None)


def _row(box: Box, dim: int, grain: int) -> int:
    """Elements of a row of this dimension."""
    return numel(box[:dim]) * grain * numel(box[dim + 1:])
