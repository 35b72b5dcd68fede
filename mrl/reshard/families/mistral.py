"""Mistral: Llama's layers; releases that attend to the whole context."""
from __future__ import annotations

from mrl.reshard.families import dense
from mrl.reshard.rules import Family

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    embedding=dense.EMBEDDING,
    layer=(dense.INPUT_NORM, dense.QKV, dense.ATTENTION_OUT, dense.MLP_NORM, dense.GATE_UP, dense.DOWN),
    final_norm=dense.FINAL_NORM,
    output=dense.OUTPUT,
    requires=(("sliding_window", None),),
    # A config that does not mention the window has one.
    defaults=(("sliding_window", 4096),),
)
