"""GLM-4-0414 and GLM-Z1, dense: norms behind attention and MLP as well, gate and up in one tensor."""
from __future__ import annotations

from dataclasses import replace

from mrl.reshard.families import dense
from mrl.reshard.pieces import joined_gate_up
from mrl.reshard.rules import Family

_GATE_UP = replace(
    dense.GATE_UP, kind=joined_gate_up, te_kind=joined_gate_up,
    hf=(("model.layers.{layer}.mlp.gate_up_proj.weight", "2*ffn hidden"),),
)

GLM4 = Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    embedding=dense.EMBEDDING,
    layer=(
        dense.INPUT_NORM, dense.QKV, dense.QKV_BIAS, dense.ATTENTION_OUT, dense.POST_ATTENTION_NORM,
        dense.MLP_NORM, _GATE_UP, dense.DOWN, dense.POST_MLP_NORM,
    ),
    final_norm=dense.FINAL_NORM,
    output=dense.OUTPUT,
    defaults=(("head_dim", 128), ("partial_rotary_factor", 0.5)),
    qkv_bias="attention_bias",
    partial_rotary=True,
    untrainable="megatron-core has no norms behind attention and MLP",
)
