"""Rotary frequencies from a Hugging Face config, by transformers' own functions."""
from __future__ import annotations

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SCALED = ("linear", "llama3", "yarn")
"""Scalings whose frequencies do not depend on the sequence length."""


def inverse_frequencies(hf_config: PretrainedConfig) -> torch.Tensor:
    """fp32 [head_dim / 2]: rotary frequencies exactly as transformers computes them, scaling included.

    Raises:
        ValueError: a scaling that depends on the sequence length, or that also scales attention.
    """
    rope = hf_config.rope_parameters
    kind = rope["rope_type"]
    if kind == "default":
        dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
        return 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if kind not in SCALED:
        raise ValueError(f"config.json: rope_type {kind!r} is not supported; supported: default, linear, llama3, and "
                         "yarn with attention_factor 1")
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))
    if attention_factor != 1.0:
        raise ValueError(f"config.json: rope_type {kind!r} scales attention by {attention_factor:.4g}, which is not "
                         f"supported; only an attention_factor of 1 is")
    return frequencies
