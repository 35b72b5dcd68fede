"""The parameters one rank holds: the family table applied to a model, a layout and a position."""
from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Iterator

from mrl.reshard.layout import Coord, Layout, layer_range
from mrl.reshard.pieces import HfTensor, Piece, Shape
from mrl.reshard.rules import Rule
from mrl.reshard.spec import ModelSpec, layout_problems


@dataclass(frozen=True, slots=True)
class ParamPlan:
    """One Megatron parameter of one rank: its name in `GPTModel.named_parameters()`, local shape, and its pieces."""

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
"""One parameter over all tensor-parallel ranks of its stage: `column[t]` is what rank t holds."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A rule where it applies: one parameter of one stage. `copy`: the tied output weight, whose original leaves."""

    name: str
    rule: Rule
    tensors: tuple[HfTensor, ...]
    copy: bool = False


def local_params(spec: ModelSpec, layout: Layout, coord: Coord, te: bool) -> list[ParamPlan]:
    """What the rank at `coord` holds, in table order. `te`: names of the Transformer Engine layer spec.

    ValueError listing every reason why the model cannot be cut this way.
    """
    problems = layout_problems(spec, layout)
    if problems:
        raise ValueError("impossible trainer layout: " + "; ".join(problems))
    plans = []
    for entry in _entries(spec, layout, coord.pp, te):
        shard = entry.rule.kind(entry.tensors, spec, layout, coord.tp)
        pieces = tuple(replace(piece, leaves=False) for piece in shard.pieces) if entry.copy else shard.pieces
        plans.append(ParamPlan(entry.name, shard.shape, pieces))
    return plans


def exported_params(spec: ModelSpec, layout: Layout, stage: int, te: bool) -> Iterator[Column]:
    """The parameters of a stage that leave it, in table order: all but tied copies."""
    shards = [local_params(spec, layout, Coord(tp=tp, pp=stage), te) for tp in range(layout.tp)]
    for column in zip(*shards, strict=True):
        if any(piece.leaves for param in column for piece in param.pieces):
            yield column


def hf_shapes(column: Column) -> dict[str, Shape]:
    """Name and global shape of the HF tensors one parameter becomes, in table order."""
    return {piece.hf: piece.hf_shape for param in column for piece in param.pieces}


def hf_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """Name and global shape of every tensor of the model's HF checkpoint, in model order."""
    whole = _entries(spec, Layout(), 0, te=False)
    return {tensor.name: tensor.shape for entry in whole for tensor in entry.tensors}


def _entries(spec: ModelSpec, layout: Layout, stage: int, te: bool) -> Iterator[_Entry]:
    family, first, last = spec.family, stage == 0, stage == layout.pp - 1

    def entry(rule: Rule, local: int = 0, layer: int = 0, copy: bool = False) -> _Entry:
        return _Entry(rule.megatron(local, te), rule, rule.tensors(spec, layer), copy)

    if first:
        yield entry(family.embedding)
    for local, layer in enumerate(layer_range(spec.num_layers, layout.pp, stage)):
        for rule in family.layer:
            yield entry(rule, local, layer)
    if last:
        yield entry(family.final_norm)
        if not spec.tied:
            yield entry(family.output)
        elif not first:  # on a stage of its own the tied output needs its own copy of the embedding
            yield entry(replace(family.output, hf=family.embedding.hf), copy=True)
