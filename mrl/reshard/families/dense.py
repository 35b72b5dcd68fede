"""The rules that decoder-only transformers with grouped attention and a SwiGLU share. Families pick from them."""
from __future__ import annotations

from mrl.reshard.pieces import gate_up, qkv, replicated, row, vocab
from mrl.reshard.rules import rule

_MEGATRON = "decoder.layers.{layer}."
_HF = "model.layers.{layer}."

EMBEDDING = rule(
    "embedding.word_embeddings.weight", vocab,
    ("model.embed_tokens.weight", "vocab hidden"),
)

INPUT_NORM = rule(
    _MEGATRON + "input_layernorm.weight", replicated,
    (_HF + "input_layernorm.weight", "hidden"),
    te=_MEGATRON + "self_attention.linear_qkv.layer_norm_weight",
)
QKV = rule(
    _MEGATRON + "self_attention.linear_qkv.weight", qkv,
    (_HF + "self_attn.q_proj.weight", "q_size hidden"),
    (_HF + "self_attn.k_proj.weight", "kv_size hidden"),
    (_HF + "self_attn.v_proj.weight", "kv_size hidden"),
)
QKV_BIAS = rule(
    _MEGATRON + "self_attention.linear_qkv.bias", qkv,
    (_HF + "self_attn.q_proj.bias", "q_size"),
    (_HF + "self_attn.k_proj.bias", "kv_size"),
    (_HF + "self_attn.v_proj.bias", "kv_size"),
    when="qkv_bias",
)
Q_NORM = rule(
    _MEGATRON + "self_attention.q_layernorm.weight", replicated,
    (_HF + "self_attn.q_norm.weight", "head_dim"),
    when="qk_norm",
)
K_NORM = rule(
    _MEGATRON + "self_attention.k_layernorm.weight", replicated,
    (_HF + "self_attn.k_norm.weight", "head_dim"),
    when="qk_norm",
)
ATTENTION_OUT = rule(
    _MEGATRON + "self_attention.linear_proj.weight", row,
    (_HF + "self_attn.o_proj.weight", "hidden q_size"),
)

MLP_NORM = rule(
    _MEGATRON + "pre_mlp_layernorm.weight", replicated,
    (_HF + "post_attention_layernorm.weight", "hidden"),
    te=_MEGATRON + "mlp.linear_fc1.layer_norm_weight",
)
GATE_UP = rule(
    _MEGATRON + "mlp.linear_fc1.weight", gate_up,
    (_HF + "mlp.gate_proj.weight", "ffn hidden"),
    (_HF + "mlp.up_proj.weight", "ffn hidden"),
)
DOWN = rule(
    _MEGATRON + "mlp.linear_fc2.weight", row,
    (_HF + "mlp.down_proj.weight", "hidden ffn"),
)

FINAL_NORM = rule(
    "decoder.final_layernorm.weight", replicated,
    ("model.norm.weight", "hidden"),
)
OUTPUT = rule(
    "output_layer.weight", vocab,
    ("lm_head.weight", "vocab hidden"),
)

# Norms of what attention and MLP put out, before it is added to the residual stream; megatron-core has none.
POST_ATTENTION_NORM = rule(
    _MEGATRON + "post_self_attn_layernorm.weight", replicated,
    (_HF + "post_self_attn_layernorm.weight", "hidden"),
)
POST_MLP_NORM = rule(
    _MEGATRON + "post_mlp_layernorm.weight", replicated,
    (_HF + "post_mlp_layernorm.weight", "hidden"),
)
