"""The parameters one rank holds: the family table applied to a model, a layout and a position."""
from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Iterable, Iterator

from mrl.reshard.layout import Coord, Layout, expert_range
from mrl.reshard.pieces import HfTensor, Piece, Shape
from mrl.reshard.rules import Rule
from mrl.reshard.spec import ModelSpec, layout_problems


@dataclass(frozen=True, slots=True)
class ParamPlan:
    """One Megatron parameter of one rank: its name, local shape, and its pieces.

    The name is that of `GPTModel.named_parameters()`, behind "chunk{c}." where the rank has several (vpp > 1).
    """

    name: str
    shape: Shape
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        """Elements of the local shard, padding included."""
        return prod(self.shape)

    @property
    def padded(self) -> bool:
        """True when the shard has elements no HF tensor fills: rows beyond the true vocabulary."""
        return sum(piece.numel for piece in self.pieces) < self.numel


Column = tuple[ParamPlan, ...]
"""One parameter over the ranks of a gather group: `column[m]` is what the group's m-th rank holds."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A rule where it applies: one parameter of one chunk of a rank.

    Layers are numbered in the chunk and over the model, experts on the rank and over the model.
    `copy`: the tied output weight, whose original leaves.
    """

    rule: Rule
    prefix: str
    local_layer: int = 0
    layer: int = 0
    local_expert: int = 0
    expert: int = 0
    copy: bool = False

    def name(self, te: bool) -> str:
        """Megatron's name."""
        return self.prefix + self.rule.megatron(self.local_layer, self.local_expert, te)

    def tensors(self, spec: ModelSpec) -> tuple[HfTensor, ...]:
        """The HF tensors it is made of."""
        return self.rule.tensors(spec, self.layer, self.expert)


def local_params(spec: ModelSpec, layout: Layout, coord: Coord, te: bool) -> list[ParamPlan]:
    """What the rank at `coord` holds, in table order. `te`: names of the Transformer Engine layer spec.

    ValueError listing every reason why the model cannot be cut this way.
    """
    _check(spec, layout)
    return list(_plans(_entries(spec, layout, coord), spec, layout, coord, te))


def chunk_prefix(layout: Layout, chunk: int) -> str:
    """What stands before Megatron's names of the parameters of one chunk."""
    return f"chunk{chunk}." if layout.vpp > 1 else ""


@dataclass(frozen=True, slots=True)
class GatherGroup:
    """Ranks of one pipeline stage that hold some parameters between them, and once more on each replica.

    `ep` None: the tp ranks, for all parameters but experts'; replicas are the dp ones. Else: the etp ranks that hold the
    experts of this index; replicas are the expert dp ones. Experts never span indices.
    `entries`: the parameters that leave from here, all but tied copies, in table order.
    """

    spec: ModelSpec = field(repr=False, compare=False)
    layout: Layout
    stage: int
    ep: int | None
    entries: tuple[_Entry, ...] = field(repr=False)

    @property
    def size(self) -> int:
        """Ranks of one replica."""
        return self.layout.tp if self.ep is None else self.layout.etp

    @property
    def stride(self) -> int:
        """Ranks from one replica to the next."""
        return self.size if self.ep is None else self.size * self.layout.ep

    @property
    def replicas(self) -> int:
        """How often the parameters are there."""
        return self.layout.tp * self.layout.dp // self.stride

    @property
    def first(self) -> int:
        """Global rank of the first rank of replica 0."""
        return self.layout.sender(self.stage) + (self.ep or 0) * self.size

    def ranks(self, replica: int) -> tuple[int, ...]:
        """Global ranks of one replica."""
        first = self.first + replica * self.stride
        return tuple(range(first, first + self.size))

    def tensors(self, entry: int) -> tuple[HfTensor, ...]:
        """The HF tensors that parameter number `entry` is made of."""
        return self.entries[entry].tensors(self.spec)

    def column(self, entry: int, te: bool) -> Column:
        """What the ranks of replica 0 hold of parameter number `entry`. Other replicas hold the same."""
        coords = [self.layout.coord(rank) for rank in self.ranks(0)]
        return tuple(plan for coord in coords
                     for plan in _plans([self.entries[entry]], self.spec, self.layout, coord, te))


def gather_groups(spec: ModelSpec, layout: Layout) -> Iterator[GatherGroup]:
    """Every group that has something to give, stage by stage, experts' after the other one.

    ValueError listing every reason why the model cannot be cut this way.
    """
    _check(spec, layout)
    for stage in range(layout.pp):
        for ep in (None, *range(layout.ep if spec.moe else 0)):
            group = GatherGroup(spec, layout, stage, ep, ())
            held = _entries(spec, layout, layout.coord(group.first))
            entries = tuple(entry for entry in held if entry.rule.expert == (ep is not None) and not entry.copy)
            if entries:
                yield replace(group, entries=entries)


def hf_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """Name and global shape of every tensor of the model's HF checkpoint, in model order."""
    whole = _entries(spec, Layout(), Coord())
    return {tensor.name: tensor.shape for entry in whole for tensor in entry.tensors(spec)}


def _check(spec: ModelSpec, layout: Layout) -> None:
    problems = layout_problems(spec, layout)
    if problems:
        raise ValueError("impossible trainer layout: " + "; ".join(problems))


def _plans(
    entries: Iterable[_Entry], spec: ModelSpec, layout: Layout, coord: Coord, te: bool,
) -> Iterator[ParamPlan]:
    """The rank's shards of its entries. A shard leaves from one rank only, the first that holds it."""
    at, experts = layout.expert_coord(coord), layout.experts
    for entry in entries:
        expert = entry.rule.expert
        grid, index, repetition = (experts, at.etp, at.dp) if expert else (layout, coord.tp, coord.dp)
        shard = entry.rule.kind(entry.tensors(spec), spec, grid, index)
        pieces = shard.pieces
        if entry.copy or repetition:
            pieces = tuple(replace(piece, leaves=False) for piece in pieces)
        yield ParamPlan(entry.name(te), shard.shape, pieces)


def _entries(spec: ModelSpec, layout: Layout, coord: Coord) -> Iterator[_Entry]:
    """What the rank holds, in table order."""
    for chunk in range(layout.vpp):
        yield from _chunk_entries(spec, layout, coord, chunk)


def _chunk_entries(spec: ModelSpec, layout: Layout, coord: Coord, chunk: int) -> Iterator[_Entry]:
    """What one chunk of the rank holds, in table order."""
    family, prefix = spec.family, chunk_prefix(layout, chunk)
    first, last = layout.is_first(coord) and chunk == 0, layout.is_last(coord) and chunk == layout.vpp - 1
    experts = expert_range(spec.moe.num_experts, layout.ep, layout.expert_coord(coord).ep) if spec.moe else range(0)

    if first:
        yield _Entry(family.embedding, prefix)
    for local_layer, layer in enumerate(layout.layers(spec.num_layers, coord.pp, chunk)):
        for rule in family.layer:
            for local_expert, expert in enumerate(experts if rule.expert else range(1)):
                yield _Entry(rule, prefix, local_layer, layer, local_expert, expert)
    if last:
        yield _Entry(family.final_norm, prefix)
        if not spec.tied:
            yield _Entry(family.output, prefix)
        elif not first:  # on a stage of its own the tied output needs its own copy of the embedding
            yield _Entry(replace(family.output, hf=family.embedding.hf), prefix, copy=True)
