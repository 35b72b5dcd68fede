"""Qwen3, dense: Llama with an RMS norm on every query and key head."""
from __future__ import annotations

from mrl.reshard.families import dense
from mrl.reshard.rules import Family

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    embedding=dense.EMBEDDING,
    layer=(
        dense.INPUT_NORM, dense.QKV, dense.Q_NORM, dense.K_NORM, dense.ATTENTION_OUT,
        dense.MLP_NORM, dense.GATE_UP, dense.DOWN,
    ),
    final_norm=dense.FINAL_NORM,
    output=dense.OUTPUT,
    requires=(("use_sliding_window", False), ("attention_bias", False)),
    # Unlike its relatives, Qwen3 does not derive the head size from the hidden size.
    defaults=(("head_dim", 128),),
    qk_norm=True,
)
