"""Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention, routed experts, and a gated expert that sees every token."""
from __future__ import annotations

from mrl.reshard.families import dense, moe
from mrl.reshard.rules import Family, MoeKeys

QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    embedding=dense.EMBEDDING,
    layer=(
        dense.INPUT_NORM, dense.QKV, dense.QKV_BIAS, dense.ATTENTION_OUT,
        moe.MLP_NORM, moe.ROUTER, moe.GATE_UP, moe.DOWN, moe.SHARED_GATE_UP, moe.SHARED_DOWN, moe.SHARED_GATE,
    ),
    final_norm=dense.FINAL_NORM,
    output=dense.OUTPUT,
    requires=(("use_sliding_window", False), ("qkv_bias", True), *moe.EVERY_LAYER),
    qkv_bias=True,
    moe=MoeKeys(
        ("num_experts",), ffn="moe_intermediate_size", shared_ffn="shared_expert_intermediate_size", shared_gate=True,
    ),
)
