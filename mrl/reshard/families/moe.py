"""The rules that models with routed experts add to those of `dense.py`, under the names most of them use.

Every parameter is stored in the model's dtype, the router's too: Megatron's `moe_router_dtype` only says in which
dtype the routing is computed. The bias that balances a router is no parameter but a float32 buffer. Experts' names
differ by layer spec: MLPs of their own in the local one (SequentialMLP), weights of one grouped linear under
Transformer Engine (TEGroupedMLP).
"""
from __future__ import annotations

from dataclasses import replace

from mrl.reshard.families import dense
from mrl.reshard.pieces import gate_up, replicated, row
from mrl.reshard.rules import rule

_MEGATRON = "decoder.layers.{layer}.mlp."
_HF = "model.layers.{layer}.mlp."

# What a config.json must say, if anything, so that no layer is dense.
EVERY_LAYER = (("mlp_only_layers", None), ("decoder_sparse_step", 1))

# The router reads the normalised input as well, so that no linear can swallow the norm.
MLP_NORM = replace(dense.MLP_NORM, te_name=dense.MLP_NORM.name)

ROUTER = rule(
    _MEGATRON + "router.weight", replicated,
    (_HF + "gate.weight", "moe.num_experts hidden"),
)
ROUTER_BIAS = rule(
    _MEGATRON + "router.expert_bias", replicated,
    (_HF + "gate.e_score_correction_bias", "moe.num_experts"),
    dtype="float32",
)
GATE_UP = rule(
    _MEGATRON + "experts.local_experts.{expert}.linear_fc1.weight", gate_up,
    (_HF + "experts.{expert}.gate_proj.weight", "moe.ffn hidden"),
    (_HF + "experts.{expert}.up_proj.weight", "moe.ffn hidden"),
    te=_MEGATRON + "experts.linear_fc1.weight{expert}",
)
DOWN = rule(
    _MEGATRON + "experts.local_experts.{expert}.linear_fc2.weight", row,
    (_HF + "experts.{expert}.down_proj.weight", "hidden moe.ffn"),
    te=_MEGATRON + "experts.linear_fc2.weight{expert}",
)

# The shared expert is an ordinary MLP, cut over tp.
SHARED_GATE_UP = rule(
    _MEGATRON + "shared_experts.linear_fc1.weight", gate_up,
    (_HF + "shared_expert.gate_proj.weight", "moe.shared_ffn hidden"),
    (_HF + "shared_expert.up_proj.weight", "moe.shared_ffn hidden"),
)
SHARED_DOWN = rule(
    _MEGATRON + "shared_experts.linear_fc2.weight", row,
    (_HF + "shared_expert.down_proj.weight", "hidden moe.shared_ffn"),
)
SHARED_GATE = rule(
    _MEGATRON + "shared_experts.gate_weight", replicated,
    (_HF + "shared_expert_gate.weight", "1 hidden"),
)

# Several shared experts are one of their common width, without a gate.
SHARED_EXPERTS_GATE_UP = replace(SHARED_GATE_UP, hf=(
    (_HF + "shared_experts.gate_proj.weight", "moe.shared_ffn hidden"),
    (_HF + "shared_experts.up_proj.weight", "moe.shared_ffn hidden"),
))
SHARED_EXPERTS_DOWN = replace(SHARED_DOWN, hf=((_HF + "shared_experts.down_proj.weight", "hidden moe.shared_ffn"),))
