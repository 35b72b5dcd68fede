"""Multi-token prediction: one more layer behind the last, with a projection of its own into it.

Checkpoints store the embedding and the output weight a second time under the layer's name; Megatron shares them.
"""
from __future__ import annotations

from dataclasses import replace

from mrl.reshard.families import dense
from mrl.reshard.pieces import column, replicated
from mrl.reshard.rules import Rule, rule

_MEGATRON = "mtp.layers.{layer}."
_HF = "model.layers.{layer}."

EMBEDDING_AGAIN = replace(dense.EMBEDDING, hf=((_HF + "embed_tokens.weight", "vocab hidden"),))
EMBEDDING_NORM = rule(_MEGATRON + "enorm.weight", replicated, (_HF + "enorm.weight", "hidden"))
HIDDEN_NORM = rule(_MEGATRON + "hnorm.weight", replicated, (_HF + "hnorm.weight", "hidden"))
PROJECTION = rule(_MEGATRON + "eh_proj.weight", column, (_HF + "eh_proj.weight", "hidden 2*hidden"))
FINAL_NORM = rule(_MEGATRON + "final_layernorm.weight", replicated, (_HF + "shared_head.norm.weight", "hidden"))
OUTPUT_AGAIN = replace(dense.OUTPUT, hf=((_HF + "shared_head.head.weight", "vocab hidden"),))


def mtp(layer: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The rules of a prediction layer around a transformer layer like `layer`."""
    return (EMBEDDING_AGAIN, EMBEDDING_NORM, HIDDEN_NORM, PROJECTION, *map(_inside, layer), FINAL_NORM, OUTPUT_AGAIN)


def _inside(layer_rule: Rule) -> Rule:
    """The rule for the transformer layer inside a prediction layer."""
    outer, inner = "decoder.layers.{layer}.", _MEGATRON + "transformer_layer."
    return replace(
        layer_rule, name=layer_rule.name.replace(outer, inner), te_name=layer_rule.te_name.replace(outer, inner))
