"""Llama 1 to 3, and the many models published in its architecture."""
from __future__ import annotations

from mrl.reshard.families import dense
from mrl.reshard.rules import Family

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    embedding=dense.EMBEDDING,
    layer=(dense.INPUT_NORM, dense.QKV, dense.ATTENTION_OUT, dense.MLP_NORM, dense.GATE_UP, dense.DOWN),
    final_norm=dense.FINAL_NORM,
    output=dense.OUTPUT,
    # attention_bias would put a bias on the attention output as well, mlp_bias on the whole MLP.
    requires=(("attention_bias", False), ("mlp_bias", False)),
    # Configs older than grouped attention say nothing about KV heads: as many as heads.
    defaults=(("num_key_value_heads", None),),
)
