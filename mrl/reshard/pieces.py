"""How one Megatron parameter is cut out of Hugging Face tensors: pieces, and one function per way of cutting.

A new layout kind (say, experts) is one more function here. A kind answers, for one tensor-parallel rank, the shape of
the local shard and the pieces that fill it. Shapes of the Hugging Face tensors are global and come from the family
table, so nothing here looks at a live parameter or at its attributes.
"""
from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Callable, Sequence

if TYPE_CHECKING:
    from torch import Tensor

    from mrl.reshard.layout import Layout
    from mrl.reshard.spec import ModelSpec

Shape = tuple[int, ...]
Span = tuple[int, int]
Box = tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class HfTensor:
    """Name and global shape of one tensor of a Hugging Face checkpoint."""

    name: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class Piece:
    """One rectangular copy between a Megatron shard and a Hugging Face tensor, valid in both directions.

    The box `hf_index` of the HF tensor (one (start, stop) per dimension) and the box `local_index` of
    `shard.view(local_view)` hold the same elements in the same order.
    """

    hf: str
    hf_shape: Shape
    hf_index: Box
    local_view: Shape
    local_index: Box
    leaves: bool = True
    """False where another rank holds the same elements and is the one that exports them."""

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

    def shaped(self, box: Tensor) -> Tensor:
        """The box cut out of the HF tensor, shaped like `shape` (only the leading dimension is ever split)."""
        return box.view(self.shape)


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
