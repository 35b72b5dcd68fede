"""Rotary frequencies from a Hugging Face config, by transformers' own functions."""
from __future__ import annotations

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mrl.reshard.spec import rope_problem


def inverse_frequencies(hf_config: PretrainedConfig) -> torch.Tensor:
    """fp32 [half the dimensions that turn]: rotary frequencies exactly as transformers computes them, with scaling.

    Raises:
        ValueError: a scaling that depends on the sequence length, or that also scales attention.
    """
    rope = hf_config.rope_parameters
    if problem := rope_problem(rope):
        raise ValueError(f"config.json: {problem}")
    if rope["rope_type"] == "default":
        dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
        dim = int(dim * rope.get("partial_rotary_factor", 1.0))
        return 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    frequencies, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](hf_config, torch.device("cpu"))
    return frequencies
