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

    The name is that of `GPTModel.named_parameters()`, behind "chunk{c}." where the rank has several (vpp > 1). Where HF
    stores a tensor twice, there are two plans of one name.
    `dtype`: None, the model's; else it is a buffer (`GPTModel.named_buffers()`) of this dtype.
    """

    name: str
    shape: Shape
    pieces: tuple[Piece, ...]
    dtype: str | None = None

    @property
    def carried(self) -> bool:
        """True for weights that are passed on and not trained: those of multi-token-prediction layers."""
        return "mtp.layers." in self.name

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


def is_expert(name: str) -> bool:
    """Whether Megatron's name is that of a routed expert's parameter (the shared expert is cut like all else)."""
    return ".mlp.experts." in name


def is_output(name: str) -> bool:
    """Whether Megatron's name is that of the output layer's weight, in a critic of its value head's."""
    return name.endswith("output_layer.weight")


@dataclass(frozen=True, slots=True)
class GatherGroup:
    """Ranks of one pipeline stage that hold some parameters between them, and once more on each replica.

    `ep` None: the tp ranks, for all parameters but experts'; replicas are the dp ones. Else: the etp ranks that hold
    the experts of this index; replicas are the expert dp ones. Experts never span indices.
    `dtype`: of its buffers, None: the model's. `entries`: what leaves from here, all but tied copies, in table order.
    `fp8`: engines get it in blockwise fp8 (`fp8.py`).
    """

    spec: ModelSpec = field(repr=False, compare=False)
    layout: Layout
    stage: int
    ep: int | None
    dtype: str | None
    entries: tuple[_Entry, ...] = field(repr=False)
    fp8: bool = False

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

    def ranks_near(self, rank: int) -> tuple[int, ...]:
        """Global ranks of the replica that `rank` is of, or that its like on this group's stage is."""
        return self.ranks(rank % (self.layout.tp * self.layout.dp) // self.stride)

    def tensors(self, entry: int) -> tuple[HfTensor, ...]:
        """The HF tensors that parameter number `entry` is made of."""
        return self.entries[entry].tensors(self.spec)

    def column(self, entry: int, te: bool) -> Column:
        """What the ranks of replica 0 hold of parameter number `entry`. Other replicas hold the same."""
        coords = [self.layout.coord(rank) for rank in self.ranks(0)]
        return tuple(plan for coord in coords
                     for plan in _plans([self.entries[entry]], self.spec, self.layout, coord, te))


def gather_groups(spec: ModelSpec, layout: Layout, fp8: bool = False) -> Iterator[GatherGroup]:
    """Every group that has something to give, stage by stage, experts' after the other ones. `fp8`: with projections,
    which leave in fp8, in groups of their own.

    ValueError listing every reason why the model cannot be cut this way.
    """
    _check(spec, layout)
    for stage in range(layout.pp):
        for ep in (None, *range(layout.ep if spec.moe else 0)):
            first = layout.coord(GatherGroup(spec, layout, stage, ep, None, ()).first)
            entries: dict[tuple[str | None, bool], list[_Entry]] = {}
            for entry in _entries(spec, layout, first):
                if entry.rule.expert == (ep is not None) and not entry.copy:
                    entries.setdefault((entry.rule.dtype, fp8 and entry.rule.projection), []).append(entry)
            for (dtype, quantised), held in entries.items():
                yield GatherGroup(spec, layout, stage, ep, dtype, tuple(held), quantised)


def hf_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """Name and global shape of every tensor of the model's HF checkpoint, in model order."""
    whole = _entries(spec, Layout(), Coord())
    return {tensor.name: tensor.shape for entry in whole for tensor in entry.tensors(spec)}


def duplicates(spec: ModelSpec) -> dict[str, str]:
    """HF tensors that a file may or must have, although Megatron has no parameter of their own for them: name -> the
    tensor that each equals. These are a tied model's output, and what multi-token-prediction layers share."""
    family = spec.family
    embedding, output = (rule.hf[0][0] for rule in (family.embedding, family.output))
    shared = {family.embedding.name: embedding, family.output.name: output}
    copies = {output: embedding} if spec.tied else {}
    for layer in range(spec.num_layers, spec.num_layers + spec.mtp_layers):
        for rule in spec.layer_rules(layer):
            if rule.name in shared:
                copies[rule.hf[0][0].format(layer=layer)] = shared[rule.name]
    return copies


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
        kind = entry.rule.te_kind if te else entry.rule.kind
        shard = kind(entry.tensors(spec), spec, grid, index)
        pieces = shard.pieces
        if entry.copy or repetition:
            pieces = tuple(replace(piece, leaves=False) for piece in pieces)
        yield ParamPlan(entry.name(te), shard.shape, pieces, entry.rule.dtype)


def _entries(spec: ModelSpec, layout: Layout, coord: Coord) -> Iterator[_Entry]:
    """What the rank holds, in table order."""
    for chunk in range(layout.vpp):
        yield from _chunk_entries(spec, layout, coord, chunk)


def _chunk_entries(spec: ModelSpec, layout: Layout, coord: Coord, chunk: int) -> Iterator[_Entry]:
    """What one chunk of the rank holds, in table order."""
    family, prefix = spec.family, chunk_prefix(layout, chunk)
    first, last = layout.has_embedding(coord, chunk), layout.has_output(coord, chunk)
    experts = expert_range(spec.moe.num_experts, layout.ep, layout.expert_coord(coord).ep) if spec.moe else range(0)

    if first:
        yield _Entry(family.embedding, prefix)
    for local_layer, layer in enumerate(layout.layers(spec.num_layers, coord.pp, chunk)):
        yield from _layer_entries(spec, prefix, local_layer, layer, experts)
    if last:
        yield _Entry(family.final_norm, prefix)
        if not spec.tied:
            yield _Entry(family.output, prefix)
        elif not first:  # on a stage of its own the tied output needs its own copy of the embedding
            yield _Entry(replace(family.output, hf=family.embedding.hf), prefix, copy=True)
    for index in range(spec.mtp_layers):
        for entry in _layer_entries(spec, prefix, index, spec.num_layers + index, experts):
            if first if entry.rule.name == family.embedding.name else last:
                yield entry


def _layer_entries(spec: ModelSpec, prefix: str, local_layer: int, layer: int, experts: range) -> Iterator[_Entry]:
    for rule in spec.layer_rules(layer):
        for local_expert, expert in enumerate(experts if rule.expert else range(1)):
            yield _Entry(rule, prefix, local_layer, layer, local_expert, expert)
