"""The rules of DeepSeek's multi-head latent attention, with and without a latent query.

The projections down to the latents give every head the same, so nothing divides them: Transformer Engine's layer spec
repeats them on every tensor-parallel rank. The local one cuts their rows all the same, and gathers what they compute.
"""
from __future__ import annotations

from dataclasses import replace

from mrl.reshard.families import dense
from mrl.reshard.pieces import column, replicated, row
from mrl.reshard.rules import rule

_MEGATRON = "decoder.layers.{layer}.self_attention."
_HF = "model.layers.{layer}.self_attn."

Q = rule(
    _MEGATRON + "linear_q_proj.weight", column,
    (_HF + "q_proj.weight", "heads*mla.qk_dim hidden"),
    when="mla.full_query",
)
KV_DOWN = rule(
    _MEGATRON + "linear_kv_down_proj.weight", column,
    (_HF + "kv_a_proj_with_mqa.weight", "mla.kv_down_dim hidden"),
    te_kind=replicated,
)
# Engines fuse the two into one weight as they load them.
Q_DOWN = rule(
    _MEGATRON + "linear_q_down_proj.weight", column,
    (_HF + "q_a_proj.weight", "mla.q_rank hidden"),
    te_kind=replicated, when="mla.q_rank",
)
Q_NORM = rule(
    _MEGATRON + "q_layernorm.weight", replicated,
    (_HF + "q_a_layernorm.weight", "mla.q_rank"),
    te=_MEGATRON + "linear_q_up_proj.layer_norm_weight", when="mla.q_rank",
)
Q_UP = rule(
    _MEGATRON + "linear_q_up_proj.weight", column,
    (_HF + "q_b_proj.weight", "heads*mla.qk_dim mla.q_rank"),
    when="mla.q_rank",
)
KV_NORM = rule(
    _MEGATRON + "kv_layernorm.weight", replicated,
    (_HF + "kv_a_layernorm.weight", "mla.kv_rank"),
    te=_MEGATRON + "linear_kv_up_proj.layer_norm_weight",
)
KV_UP = rule(
    _MEGATRON + "linear_kv_up_proj.weight", column,
    (_HF + "kv_b_proj.weight", "heads*mla.kv_up_dim mla.kv_rank"),
)
OUT = rule(
    _MEGATRON + "linear_proj.weight", row,
    (_HF + "o_proj.weight", "hidden heads*mla.v_dim"),
)

# Two projections read the normalised input, so that neither can swallow the norm.
INPUT_NORM = replace(dense.INPUT_NORM, te_name=dense.INPUT_NORM.name)
ATTENTION = (INPUT_NORM, Q, KV_DOWN, Q_DOWN, Q_NORM, Q_UP, KV_NORM, KV_UP, OUT)
