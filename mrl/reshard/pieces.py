"""How one Megatron parameter is cut out of Hugging Face tensors: pieces, and one function per way of cutting.

A new layout kind is one more function here. A kind answers, for one tensor-parallel rank, the shape of the local shard
and the pieces that fill it. Shapes of the Hugging Face tensors are global and come from the family table, so nothing
here looks at a live parameter or at its attributes.
"""
from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from math import prod
from typing import TYPE_CHECKING, Callable, Iterator, Sequence

if TYPE_CHECKING:
    from torch import Tensor

    from mrl.reshard.layout import Layout
    from mrl.reshard.spec import ModelSpec

Shape = tuple[int, ...]
Span = tuple[int, int]
Box = tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class HfTensor:
    """Name and global shape of one tensor of a Hugging Face checkpoint.

    `expert`: which expert of it is meant, where it stacks the experts of a layer in its first dimension.
    """

    name: str
    shape: Shape
    expert: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """One rectangular copy between a Megatron shard and a Hugging Face tensor, valid in both directions.

    The box `hf_index` of the HF tensor (one (start, stop) per dimension) and the box `local_index` of
    `shard.view(local_view)` hold the same elements. Read row by row, the HF box runs through the dimensions of the
    local box in the order `order`, the last one fastest; None: in their own order. That is all that ever differs: a
    transposed HF tensor has order (1, 0); one whose rows alternate between two local blocks has local_view
    (2, rows, columns) and order (1, 0, 2).
    """

    hf: str
    hf_shape: Shape
    hf_index: Box
    local_view: Shape
    local_index: Box
    leaves: bool = True
    """False where another rank holds the same elements and is the one that exports them."""
    order: tuple[int, ...] | None = None

    @property
    def shape(self) -> Shape:
        """Shape of the box inside `shard.view(local_view)`."""
        return tuple(stop - start for start, stop in self.local_index)

    @property
    def numel(self) -> int:
        """Elements copied."""
        return prod(self.shape)

    def of_hf(self, tensor: Tensor) -> Tensor:
        """The piece as a view of the whole HF tensor (shape `hf_shape`), shaped like `shape`."""
        return self.shaped(tensor[slices(self.hf_index)])

    def of_local(self, shard: Tensor) -> Tensor:
        """The piece as a view of the contiguous local shard, shaped like `shape`."""
        return shard.view(self.local_view)[slices(self.local_index)]

    def boxes(self, shard: Tensor, most: int) -> list[tuple[Box, Tensor]] | None:
        """The piece as boxes of the HF tensor, each with its elements as a view of the shard in the shape of the box.

        Several where neighbouring rows of the HF tensor lie apart in the shard; None where that takes more than `most`.
        """
        order = self.order or tuple(range(len(self.shape)))
        groups = _dimensions(self.hf_index, [self.shape[dim] for dim in order])
        found = list(islice(_views(self.hf_index, self.of_local(shard).permute(order), groups), most + 1))
        return found if len(found) <= most else None

    def shaped(self, box: Tensor) -> Tensor:
        """The box cut out of the HF tensor, as a view shaped like `shape`."""
        if self.order is None:
            return box.view(self.shape)
        split = box.view([self.shape[dim] for dim in self.order])
        return split.permute([self.order.index(dim) for dim in range(len(self.order))])

    def clipped(self, box: Box) -> tuple[Piece, ...]:
        """The part of the piece inside `box` of the HF tensor, as pieces: none, one, or more.

        More only where the box cuts rows of the HF tensor that are several dimensions of the shard at a place that is
        no multiple of the last of these.
        """
        order = self.order or tuple(range(len(self.local_index)))
        hf_runs, groups = [], _dimensions(self.hf_index, [self.shape[dim] for dim in order])
        for (start, stop), (low, high), sizes in zip(self.hf_index, box, groups, strict=True):
            low, high = max(start, low), min(stop, high)
            if low >= high:
                return ()
            hf_runs.append([(start, run) for run in _runs(low - start, high - start, sizes)])
        return tuple(self._inside(order, chosen) for chosen in product(*hf_runs))

    def _inside(self, order: tuple[int, ...], runs: Sequence[tuple[int, tuple[Span, Box]]]) -> Piece:
        """The piece made of one run of every HF dimension; a run counts from the dimension's first element here."""
        hf_index = tuple((start + low, start + high) for start, ((low, high), _) in runs)
        spans = [span for _, (_, local) in runs for span in local]
        local_index = list(self.local_index)
        for dim, (low, high) in zip(order, spans):
            first = self.local_index[dim][0]
            local_index[dim] = (first + low, first + high)
        return replace(self, hf_index=hf_index, local_index=tuple(local_index))


def _views(box: Box, view: Tensor, groups: Sequence[Sequence[int]]) -> Iterator[tuple[Box, Tensor]]:
    """A box whose elements `view` has, with one or more dimensions (`groups`) for each of the box's, as boxes whose
    elements can be had in their own shape."""
    with suppress(RuntimeError):  # torch's word for dimensions that cannot be joined without a copy
        yield box, view.view([stop - start for start, stop in box])
        return
    which = next(position for position, group in enumerate(groups) if len(group) > 1)
    dim, (count, *finer), (start, stop) = sum(map(len, groups[:which])), groups[which], box[which]
    for index in range(count):
        span = tuple(start + (stop - start) // count * edge for edge in (index, index + 1))
        yield from _views((*box[:which], span, *box[which + 1:]), view.select(dim, index),
                          [*groups[:which], finer, *groups[which + 1:]])


def _dimensions(hf_index: Box, sizes: Sequence[int]) -> list[list[int]]:
    """For every dimension of an HF box the local sizes it splits into; `sizes` are all of them, in HF order."""
    left = list(sizes)
    groups: list[list[int]] = []
    for start, stop in hf_index:
        group: list[int] = []
        while prod(group) < stop - start:
            group.append(left.pop(0))
        groups.append(group)
    return groups


def _runs(start: int, stop: int, sizes: Sequence[int]) -> Iterator[tuple[Span, Box]]:
    """Elements start … stop of a row-major grid as boxes of it, in order, each with the elements it covers."""
    if not sizes:
        yield (start, stop), ()
        return
    row = prod(sizes[1:])
    begin, end = -(-start // row) * row, stop // row * row
    if stop - start < row and start // row == (stop - 1) // row:  # inside one row
        at = start // row
        for (low, high), box in _runs(start - at * row, stop - at * row, sizes[1:]):
            yield (at * row + low, at * row + high), ((at, at + 1), *box)
        return
    if start < begin:
        yield from _runs(start, begin, sizes)
    if begin < end:
        yield (begin, end), ((begin // row, end // row), *_whole(sizes[1:]))
    if end < stop:
        yield from _runs(end, stop, sizes)


def slices(box: Box) -> tuple[slice, ...]:
    """A box as an index for tensors and safetensors slices."""
    return tuple(slice(start, stop) for start, stop in box)


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank holds of one parameter. Elements covered by no piece are vocabulary padding."""

    shape: Shape
    pieces: tuple[Piece, ...]


Kind = Callable[[Sequence[HfTensor], "ModelSpec", "Layout", int], Shard]
"""(HF tensors, model, layout, tensor-parallel rank) -> what that rank holds."""


def replicated(tensors: Sequence[HfTensor], spec: ModelSpec, layout: Layout, rank: int) -> Shard:
    """The whole tensor on every rank (norms); rank 0 exports it."""
    (tensor,) = tensors
    whole = _whole(tensor.shape)
    return Shard(tensor.shape, (Piece(tensor.name, tensor.shape, whole, tensor.shape, whole, leaves=rank == 0),))


def row(tensors: Sequence[HfTensor], spec: ModelSpec, layout: Layout, rank: int) -> Shard:
    """Row parallel: input features, the last dimension, split evenly (attention output, down projection)."""
    (tensor,) = tensors
    *lead, width = tensor.shape
    part = _divide(width, layout.tp, tensor)
    shape = (*lead, part)
    columns = (rank * part, (rank + 1) * part)
    return Shard(shape, (Piece(tensor.name, tensor.shape, (*_whole(lead), columns), shape, _whole(shape)),))


def vocab(tensors: Sequence[HfTensor], spec: ModelSpec, layout: Layout, rank: int) -> Shard:
    """Vocabulary rows split evenly after padding; the piece stops at the true vocabulary, so padding never leaves."""
    (tensor,) = tensors
    rows, *rest = tensor.shape
    part = layout.padded_vocab(rows) // layout.tp
    shape = (part, *rest)
    first, last = min(rank * part, rows), min((rank + 1) * part, rows)
    if first == last:
        return Shard(shape, ())
    index = ((first, last), *_whole(rest))
    return Shard(shape, (Piece(tensor.name, tensor.shape, index, shape, ((0, last - first), *_whole(rest))),))


def column(tensors: Sequence[HfTensor], spec: ModelSpec, layout: Layout, rank: int) -> Shard:
    """Column parallel: output features, the first dimension, split evenly (MLA's projections, one value a head)."""
    (tensor,) = tensors
    rows, *rest = tensor.shape
    part = _divide(rows, layout.tp, tensor)
    shape = (part, *rest)
    return Shard(shape, (Piece(
        tensor.name, tensor.shape, ((rank * part, (rank + 1) * part), *_whole(rest)), shape, _whole(shape)),))


def gate_up(tensors: Sequence[HfTensor], spec: ModelSpec, layout: Layout, rank: int) -> Shard:
    """SwiGLU's first projection: every rank stacks its own slice of gate on its own slice of up."""
    gate, _ = tensors
    rows, *rest = gate.shape
    part = _divide(rows, layout.tp, gate)
    shape = (2 * part, *rest)
    taken = ((rank * part, (rank + 1) * part), *_whole(rest))
    return Shard(shape, tuple(
        Piece(tensor.name, tensor.shape, taken, shape, ((i * part, (i + 1) * part), *_whole(rest)))
        for i, tensor in enumerate(tensors)
    ))


def joined_gate_up(tensors: Sequence[HfTensor], spec: ModelSpec, layout: Layout, rank: int) -> Shard:
    """`gate_up` where one HF tensor holds all rows of gate and then all rows of up."""
    (tensor,) = tensors
    rows, *rest = tensor.shape
    half = rows // 2
    part = _divide(half, layout.tp, tensor)
    shape = (2 * part, *rest)
    return Shard(shape, tuple(
        Piece(tensor.name, tensor.shape, ((i * half + rank * part, i * half + (rank + 1) * part), *_whole(rest)),
              shape, ((i * part, (i + 1) * part), *_whole(rest)))
        for i in range(2)
    ))


def alternating_gate_up(tensors: Sequence[HfTensor], spec: ModelSpec, layout: Layout, rank: int) -> Shard:
    """`gate_up` where the rows of one HF tensor are a row of gate, a row of up, a row of gate, …"""
    (tensor,) = tensors
    rows, *rest = tensor.shape
    part = _divide(rows // 2, layout.tp, tensor)
    view = (2, part, *rest)
    order = (1, 0, *range(2, len(view)))
    taken = ((2 * rank * part, 2 * (rank + 1) * part), *_whole(rest))
    return Shard((2 * part, *rest), (Piece(tensor.name, tensor.shape, taken, view, _whole(view), order=order),))


def transposed(kind: Kind) -> Kind:
    """`kind` for HF tensors of two dimensions, (input features, output features), the other way round than Megatron."""
    return partial(_transposed, kind)


def _transposed(kind: Kind, tensors: Sequence[HfTensor], spec: ModelSpec, layout: Layout, rank: int) -> Shard:
    shard = kind([replace(tensor, shape=tensor.shape[::-1]) for tensor in tensors], spec, layout, rank)
    return Shard(shard.shape, tuple(_transposed_piece(piece) for piece in shard.pieces))


def _transposed_piece(piece: Piece) -> Piece:
    order = piece.order or tuple(range(len(piece.local_index)))
    rows, _ = _dimensions(piece.hf_index, [piece.shape[dim] for dim in order])
    order = (*order[len(rows):], *order[:len(rows)])
    return replace(piece, hf_shape=piece.hf_shape[::-1], hf_index=piece.hf_index[::-1], order=order)


def stacked(kind: Kind) -> Kind:
    """`kind` for one expert of HF tensors that hold all experts of a layer, along their first dimension."""
    return partial(_stacked, kind)


def _stacked(kind: Kind, tensors: Sequence[HfTensor], spec: ModelSpec, layout: Layout, rank: int) -> Shard:
    shard = kind([replace(tensor, shape=tensor.shape[1:]) for tensor in tensors], spec, layout, rank)
    (count,), (expert,) = {tensor.shape[0] for tensor in tensors}, {tensor.expert for tensor in tensors}
    return Shard(shard.shape, tuple(
        replace(piece, hf_shape=(count, *piece.hf_shape), hf_index=((expert, expert + 1), *piece.hf_index))
        for piece in shard.pieces
    ))


def qkv(tensors: Sequence[HfTensor], spec: ModelSpec, layout: Layout, rank: int) -> Shard:
    """Fused attention projection, weight or bias: for every KV head its query heads, then its key, then its value.

    Megatron splits these rows evenly over tp. With at least tp KV heads a rank holds whole groups; with fewer, several
    ranks share one group and each holds a window of its rows, which may begin and end inside a head.
    """
    groups = spec.kv_heads
    per_group = [tensor.shape[0] // groups for tensor in tensors]
    rest = tensors[0].shape[1:]
    held = _divide(sum(per_group) * groups, layout.tp, tensors[0])
    first_group, start = divmod(rank * held, sum(per_group))
    count = max(1, held // sum(per_group))
    window = (start, start + held // count)

    pieces, top = [], 0
    for tensor, length in zip(tensors, per_group):
        low, high = max(top, window[0]), min(top + length, window[1])
        if low < high:
            taken = (first_group * length + low - top, (first_group + count - 1) * length + high - top)
            pieces.append(Piece(
                tensor.name, tensor.shape, (taken, *_whole(rest)),
                (count, held // count, *rest), ((0, count), (low - start, high - start), *_whole(rest)),
            ))
        top += length
    return Shard((held, *rest), tuple(pieces))


def _whole(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def _divide(size: int, parts: int, tensor: HfTensor) -> int:
    if size % parts:
        raise ValueError(f"{tensor.name} {tensor.shape}: {size} does not divide over tp {parts}")
    return size // parts
