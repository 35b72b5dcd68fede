"""Qwen3-MoE: Qwen3's attention and routed experts, none of them shared."""
from __future__ import annotations

from mrl.reshard.families import dense, moe
from mrl.reshard.rules import Family, MoeKeys

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    embedding=dense.EMBEDDING,
    layer=(
        dense.INPUT_NORM, dense.QKV, dense.Q_NORM, dense.K_NORM, dense.ATTENTION_OUT,
        moe.MLP_NORM, moe.ROUTER, moe.GATE_UP, moe.DOWN,
    ),
    final_norm=dense.FINAL_NORM,
    output=dense.OUTPUT,
    requires=(("use_sliding_window", False), ("attention_bias", False), *moe.EVERY_LAYER),
    qk_norm=True,
    # The published files have the first key, those that transformers 5 writes the second.
    moe=MoeKeys(("num_experts", "num_local_experts"), ffn="moe_intermediate_size"),
)
