"""Mixtral: Mistral's attention and routed experts, under names of its own."""
from __future__ import annotations

from dataclasses import replace

from mrl.reshard.families import dense, moe
from mrl.reshard.rules import Family, MoeKeys

_HF = "model.layers.{layer}.block_sparse_moe."

_ROUTER = replace(moe.ROUTER, hf=((_HF + "gate.weight", "moe.num_experts hidden"),))
_GATE_UP = replace(moe.GATE_UP, hf=(
    (_HF + "experts.{expert}.w1.weight", "moe.ffn hidden"),
    (_HF + "experts.{expert}.w3.weight", "moe.ffn hidden"),
))
_DOWN = replace(moe.DOWN, hf=((_HF + "experts.{expert}.w2.weight", "hidden moe.ffn"),))

MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    embedding=dense.EMBEDDING,
    layer=(dense.INPUT_NORM, dense.QKV, dense.ATTENTION_OUT, moe.MLP_NORM, _ROUTER, _GATE_UP, _DOWN),
    final_norm=dense.FINAL_NORM,
    output=dense.OUTPUT,
    # Noise on the router's input would be part of training. The chosen experts' weights always sum to 1.
    requires=(("sliding_window", None), ("router_jitter_noise", 0.0), ("norm_topk_prob", True)),
    defaults=(("norm_topk_prob", True), ("rope_theta", 1e6)),
    moe=MoeKeys(("num_local_experts",), ffn="intermediate_size"),
)
