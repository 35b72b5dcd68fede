"""gpt-oss, from a bfloat16 checkpoint: biases on all linears, a learned sink per head, experts stacked and transposed.

Sliding and full attention take turns, which makes no difference to the weights. Megatron stacks gate on up where the
checkpoint lets their columns alternate.
"""
from __future__ import annotations

from dataclasses import replace

from mrl.reshard.families import dense, moe
from mrl.reshard.pieces import alternating_gate_up, column, replicated, row, stacked, transposed
from mrl.reshard.rules import Family, MoeKeys, rule

_MEGATRON = "decoder.layers.{layer}."
_HF = "model.layers.{layer}."
_EXPERTS = _MEGATRON + "mlp.experts."
_HF_EXPERTS = _HF + "mlp.experts."

_OUT_BIAS = rule(
    _MEGATRON + "self_attention.linear_proj.bias", replicated,
    (_HF + "self_attn.o_proj.bias", "hidden"),
)
_SINKS = rule(
    _MEGATRON + "self_attention.core_attention.softmax_offset", column,
    (_HF + "self_attn.sinks", "heads"),
)
_ROUTER = replace(moe.ROUTER, hf=((_HF + "mlp.router.weight", "moe.num_experts hidden"),))
_ROUTER_BIAS = rule(
    _MEGATRON + "mlp.router.bias", replicated,
    (_HF + "mlp.router.bias", "moe.num_experts"),
)
_GATE_UP = rule(
    _EXPERTS + "local_experts.{expert}.linear_fc1.weight", stacked(transposed(alternating_gate_up)),
    (_HF_EXPERTS + "gate_up_proj", "moe.num_experts hidden 2*moe.ffn"),
    te=_EXPERTS + "linear_fc1.weight{expert}",
)
_GATE_UP_BIAS = rule(
    _EXPERTS + "local_experts.{expert}.linear_fc1.bias", stacked(alternating_gate_up),
    (_HF_EXPERTS + "gate_up_proj_bias", "moe.num_experts 2*moe.ffn"),
    te=_EXPERTS + "linear_fc1.bias{expert}",
)
_DOWN = rule(
    _EXPERTS + "local_experts.{expert}.linear_fc2.weight", stacked(transposed(row)),
    (_HF_EXPERTS + "down_proj", "moe.num_experts moe.ffn hidden"),
    te=_EXPERTS + "linear_fc2.weight{expert}",
)
_DOWN_BIAS = rule(
    _EXPERTS + "local_experts.{expert}.linear_fc2.bias", stacked(replicated),
    (_HF_EXPERTS + "down_proj_bias", "moe.num_experts hidden"),
    te=_EXPERTS + "linear_fc2.bias{expert}",
)

GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    embedding=dense.EMBEDDING,
    layer=(
        dense.INPUT_NORM, dense.QKV, dense.QKV_BIAS, _SINKS, dense.ATTENTION_OUT, _OUT_BIAS,
        moe.MLP_NORM, _ROUTER, _ROUTER_BIAS, _GATE_UP, _GATE_UP_BIAS, _DOWN, _DOWN_BIAS,
    ),
    final_norm=dense.FINAL_NORM,
    output=dense.OUTPUT,
    requires=(("attention_bias", True),),
    defaults=(("head_dim", 64), ("rope_theta", 150000.0)),
    qkv_bias=True,
    layer_types=("full_attention", "sliding_attention"),
    moe=MoeKeys(("num_local_experts",), ffn="intermediate_size"),
    untrainable="its attention sinks and sliding windows need Transformer Engine's attention of 2.8 or newer, and the "
                "trainer builds neither them nor its clamped SwiGLU and biased experts",
)
