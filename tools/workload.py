"""What benchmarks work on: model shapes with random weights, and lengths with a long tail."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Mapping

import torch
from safetensors.torch import save_file

from mrl.reshard.params import hf_tensors
from mrl.reshard.spec import model_spec
from tools.make_quickstart import make_tokenizer

_COMMON = {"hidden_act": "silu", "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-6,
           "rope_theta": 1e6, "torch_dtype": "bfloat16", "use_sliding_window": False}
_QWEN2 = {**_COMMON, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_position_embeddings": 32768,
          "num_hidden_layers": 28}
_QWEN3 = {**_COMMON, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False,
          "max_position_embeddings": 40960}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "tiny": {**_QWEN3, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 512, "tie_word_embeddings": True},
    "qwen3-0.6b": {**_QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                   "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
                   "tie_word_embeddings": True},
    "qwen2.5-1.5b": {**_QWEN2, "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12,
                     "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "qwen2.5-7b": {**_QWEN2, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
                   "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
    "qwen3-30b-a3b": {**_QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
                      "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
                      "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
                      "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
                      "mlp_only_layers": [], "vocab_size": 151936, "tie_word_embeddings": False},
}
SPREAD = 0.02
SHORTEST = 16


def shape_only(folder: Path, shape: str, **changes: Any) -> Path:
    """A model directory with a config, in which `changes` count, and a tokenizer, and no weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**SHAPES[shape], **changes}))
    make_tokenizer().save_pretrained(folder)
    return folder


def random_model(folder: Path, shape: str, device: torch.device, **changes: Any) -> Path:
    """A model directory with random bfloat16 weights: norms 1, all else normal with deviation SPREAD. `changes`: of its
    config."""
    generator = torch.Generator(device).manual_seed(1)
    tensors = {}
    for name, size in hf_tensors(model_spec({**SHAPES[shape], **changes})).items():
        tensor = torch.ones(size, dtype=torch.bfloat16, device=device)
        tensors[name] = (tensor if "norm" in name else tensor.normal_(0, SPREAD, generator=generator)).cpu()
    shape_only(folder, shape, **changes)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def long_tailed(count: int, middle: int, sigma: float, longest: int, seed: int = 1) -> list[int]:
    """`count` lengths: log-normal around the median `middle` (sigma: of the logarithm), between SHORTEST and `longest`.
    """
    draws = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    return (middle * (sigma * draws).exp()).round().clamp(SHORTEST, longest).long().tolist()
