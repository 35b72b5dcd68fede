"""Gemma 3, text only: norms before and behind attention and MLP, on queries and keys, stored as the scale minus 1.

Megatron stores them the same way (`layernorm_zero_centered_gamma`). Scaled embeddings, GeGLU and the turns that sliding
and full attention take make no difference to the weights.
"""
from __future__ import annotations

from dataclasses import replace

from mrl.reshard.families import dense
from mrl.reshard.rules import Family

_HF = "model.layers.{layer}."

# What others call the norm before the MLP is the one behind attention here.
_POST_ATTENTION_NORM = replace(
    dense.POST_ATTENTION_NORM, hf=((_HF + "post_attention_layernorm.weight", "hidden"),))
_MLP_NORM = replace(dense.MLP_NORM, hf=((_HF + "pre_feedforward_layernorm.weight", "hidden"),))
_POST_MLP_NORM = replace(dense.POST_MLP_NORM, hf=((_HF + "post_feedforward_layernorm.weight", "hidden"),))

GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    embedding=dense.EMBEDDING,
    layer=(
        dense.INPUT_NORM, dense.QKV, dense.Q_NORM, dense.K_NORM, dense.ATTENTION_OUT, _POST_ATTENTION_NORM,
        _MLP_NORM, dense.GATE_UP, dense.DOWN, _POST_MLP_NORM,
    ),
    final_norm=dense.FINAL_NORM,
    output=dense.OUTPUT,
    requires=(
        ("hidden_activation", "gelu_pytorch_tanh"), ("attention_bias", False), ("attn_logit_softcapping", None),
        ("final_logit_softcapping", None), ("use_bidirectional_attention", False),
    ),
    defaults=(("head_dim", 256), ("tie_word_embeddings", True), ("rope_theta", 1e6)),
    qk_norm=True,
    layer_types=("full_attention", "sliding_attention"),
    untrainable="megatron-core has no norms behind attention and MLP, and no rotary embedding that differs by layer",
)
