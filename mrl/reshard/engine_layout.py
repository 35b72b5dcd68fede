"""Where the engines' workers stand, and which boxes of each Hugging Face tensor every one of them holds.

vLLM and SGLang cut the same way, and differ in how they count workers:

    vLLM     W = tp * dp; worker = dp index * tp + tp index. Attention and MLPs are cut over tp, and repeated over dp.
    SGLang   W = tp; attention is cut over tp / dp, and repeated over dp; MLPs are cut over tp.

Experts are dealt in blocks over ep, and each is cut over the W / ep workers of its block.
"""
from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Callable, Literal, Mapping, Sequence

from mrl.reshard.boxes import Box, whole
from mrl.reshard.pieces import Kind, Shape, column, gate_up, joined_gate_up, qkv, replicated, row, vocab
from mrl.reshard.rules import Rule
from mrl.reshard.spec import ModelSpec

VOCAB_MULTIPLE = 64
"""Both engines pad the vocabulary to a multiple of this before they cut it."""


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """`count` engines of one kind and their parallel sizes, with the names and the meaning the engine itself has.

    `ep`: parts into which the experts of a layer are divided: 1 (each expert is cut over all workers) or, as vLLM's
    --enable-expert-parallel has it, all workers. SGLang allows sizes between. `dp`: attention data parallelism.
    `gpus_per_node`: of the engines' nodes; the workers of an engine fill nodes one after the other.
    ValueError for a size below 1, or for sizes that do not divide.
    """

    engine: Literal["vllm", "sglang"] = "vllm"
    count: int = 1
    tp: int = 1
    ep: int = 1
    dp: int = 1
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        for name in ("count", "tp", "ep", "dp", "gpus_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"engine layout: {name} is {getattr(self, name)}, but must be at least 1")
        if self.engine == "sglang" and self.tp % self.dp:
            raise ValueError(f"engine layout: dp {self.dp} does not divide tp {self.tp}, as SGLang needs it to")
        if self.world % self.ep:
            raise ValueError(f"engine layout: ep {self.ep} does not divide the {self.world} workers of an engine")

    @property
    def world(self) -> int:
        """Workers of one engine."""
        return self.tp * self.dp if self.engine == "vllm" else self.tp

    @property
    def node(self) -> int:
        """Workers that all-gather the slices of a bucket among themselves: neighbours, all on one node."""
        return gcd(self.world, self.gpus_per_node)


@dataclass(frozen=True, slots=True)
class _Cut:
    """Part number `index` of `parts` equal ones: a worker's share of a tensor."""

    parts: int
    index: int

    def span(self, size: int) -> tuple[int, int] | None:
        """Its share of a dimension; None where that does not divide."""
        share, rest = divmod(size, self.parts)
        return None if rest else (self.index * share, (self.index + 1) * share)


Held = Callable[[int, Shape, ModelSpec, _Cut], Sequence[tuple[tuple[int, int] | None, int]]]
"""(number of the tensor in its rule, its shape, model, share) -> (span, dimension) of every box that is held."""


def _rows(tensor: int, shape: Shape, spec: ModelSpec, cut: _Cut) -> list:
    return [(cut.span(shape[0]), 0)]


def _columns(tensor: int, shape: Shape, spec: ModelSpec, cut: _Cut) -> list:
    return [(cut.span(shape[-1]), len(shape) - 1)]


def _two_halves(tensor: int, shape: Shape, spec: ModelSpec, cut: _Cut) -> list:
    half = shape[0] // 2
    span = cut.span(half)
    return [(span and (first + span[0], first + span[1]), 0) for first in (0, half)]


def _heads(tensor: int, shape: Shape, spec: ModelSpec, cut: _Cut) -> list:
    """Whole heads. With fewer KV heads than workers, neighbours hold the same one."""
    heads = spec.heads if tensor == 0 else spec.kv_heads
    if tensor and heads < cut.parts:
        repeats, rest = divmod(cut.parts, heads)
        return [(None if rest else _Cut(heads, cut.index // repeats).span(shape[0]), 0)]
    return [(None if heads % cut.parts else cut.span(shape[0]), 0)]


def _vocabulary(tensor: int, shape: Shape, spec: ModelSpec, cut: _Cut) -> list:
    span = cut.span(-(-shape[0] // VOCAB_MULTIPLE) * VOCAB_MULTIPLE)
    return [(span and (min(span[0], shape[0]), min(span[1], shape[0])), 0)]


_SHARDED: Mapping[Kind, Held] = {
    qkv: _heads, gate_up: _rows, joined_gate_up: _two_halves, row: _columns, column: _rows,
}
_HELD: Mapping[Kind, Held] = {**_SHARDED, vocab: _vocabulary, replicated: lambda *_: []}


def shardable(rule: Rule) -> bool:
    """Whether tensors of this rule may go from shard to shard: MLPs, experts and attention projections."""
    return rule.te_kind in _SHARDED and (_attention(rule) or ".mlp." in rule.name)


def _attention(rule: Rule) -> bool:
    return ".self_attention." in rule.name


def expert_block(expert: int, num_experts: int, ep: int) -> int:
    """Which of `ep` blocks an expert is in: contiguous ones, the first ones larger where they cannot be equal."""
    share, larger = divmod(num_experts, ep)
    edge = larger * (share + 1)
    return expert // (share + 1) if expert < edge else larger + (expert - edge) // share


def held_boxes(
    rule: Rule, tensor: int, shape: Shape, expert: int, spec: ModelSpec, layout: EngineLayout, worker: int,
) -> tuple[Box, ...] | None:
    """Boxes of one HF tensor, of shape `shape` and number `tensor` in its rule, that an engine's worker holds.

    `expert`: number of the expert, for a rule of experts. Empty where the worker holds nothing of it. None where this
    table does not know, because the kind is not in it or the sizes do not divide.
    """
    if rule.te_kind not in _HELD:  # engines, like Transformer Engine, repeat MLA's projections down to the latents
        return None
    cut = _Cut(layout.tp, worker % layout.tp)
    if rule.expert:
        block, index = divmod(worker, layout.world // layout.ep)
        if block != expert_block(expert, spec.moe.num_experts, layout.ep):
            return ()
        cut = _Cut(layout.world // layout.ep, index)
    elif _attention(rule) and layout.engine == "sglang":
        cut = _Cut(layout.tp // layout.dp, worker % (layout.tp // layout.dp))
    spans = _HELD[rule.te_kind](tensor, shape, spec, cut)
    if any(span is None for span, _ in spans):
        return None
    everything = whole(shape)
    if not spans:
        return (everything,)
    return tuple((*everything[:dim], span, *everything[dim + 1:]) for span, dim in spans if span[0] < span[1])
