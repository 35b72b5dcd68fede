"""Qwen2 and Qwen2.5, dense: Llama with a bias on q, k and v."""
from __future__ import annotations

from mrl.reshard.families import dense
from mrl.reshard.rules import Family

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    embedding=dense.EMBEDDING,
    layer=(
        dense.INPUT_NORM, dense.QKV, dense.QKV_BIAS, dense.ATTENTION_OUT,
        dense.MLP_NORM, dense.GATE_UP, dense.DOWN,
    ),
    final_norm=dense.FINAL_NORM,
    output=dense.OUTPUT,
    requires=(("use_sliding_window", False),),
    qkv_bias=True,
)
