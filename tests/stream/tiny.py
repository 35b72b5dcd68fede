"""A tiny Qwen3, its weights at any version, what transformers says about it, and a stand-in for the trainer."""
from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast, Qwen3Config,
                          Qwen3MoeConfig)

from mrl.config.schema import Experiment
from mrl.reshard.fp8 import quantization_config
from mrl.reshard.layout import Coord, Layout
from mrl.reshard.params import hf_tensors, local_params
from mrl.reshard.spec import model_spec, read_config
from tests.rollout.experiments import experiment

VOCAB = 67
PROMPT = [5, 17, 60, 33, 8, 41, 22]
COMMON = dict(vocab_size=VOCAB, num_attention_heads=4, max_position_embeddings=128, tie_word_embeddings=False,
              eos_token_id=VOCAB - 1)
"""Of the models here: the end-of-sequence token never comes."""
DENSE = Qwen3Config(**COMMON, hidden_size=48, intermediate_size=80, num_hidden_layers=4, num_key_value_heads=2,
                    head_dim=32)
EXPERTS = Qwen3MoeConfig(**COMMON, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=2, num_key_value_heads=2,
                         head_dim=32, num_experts=4, num_experts_per_tok=2)


def make_model(path: Path, config: PretrainedConfig = DENSE) -> Path:
    """A model directory: random weights, and a tokenizer of one word a token."""
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"t{VOCAB - 1}").save_pretrained(path)
    return path


def make_moe(path: Path, **sizes: int) -> Path:
    """A directory with the config of a tiny Qwen3-MoE; no tokenizer and no weights."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({
        "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 2, "hidden_size": 24, "intermediate_size": 40,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB, "rms_norm_eps": 1e-6,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 28, **sizes}))
    return path


def make_experiment(model: Path, python: str, **sections) -> Experiment:
    """Several small buckets, short answers."""
    sync = {"bucket_mb": 0.06, "timeout_s": 300, **sections.pop("sync", {})}
    rollout = {"python": python, "max_concurrent_requests": 32, "sampling": {"max_response_tokens": 24},
               "start_timeout_s": 600, **sections.pop("rollout", {})}
    return experiment(model={"path": str(model), "dtype": "float32"}, data={"train": "-", "max_prompt_tokens": 40},
                      sync=sync, rollout=rollout, **sections)


def weights(model: Path, version: int) -> dict[str, torch.Tensor]:
    """Every HF tensor, random by version; norms around 1. Sampling from it is far from uniform and from certain."""
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) * 0.2 + (1.0 if "norm" in name else 0.0)
            for name, shape in hf_tensors(model_spec(read_config(model))).items()}


def quantised(model: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What is published of these tensors in fp8: projections by blocks, computed one by one, with scales; all else as
    it is."""
    plain = quantization_config(model_spec(read_config(model)))["modules_to_not_convert"]
    made = {}
    for name, tensor in tensors.items():
        if tensor.dim() < 2 or name.removesuffix(".weight") in plain:
            made[name] = tensor
            continue
        made[name] = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
        made[f"{name}_scale_inv"] = torch.empty([-(-size // 128) for size in tensor.shape])
        for row in range(0, tensor.shape[0], 128):
            for column in range(0, tensor.shape[1], 128):
                block = tensor[row:row + 128, column:column + 128].float()
                scale = torch.clamp(block.abs().max() / 448, min=2.0 ** -126)
                made[name][row:row + 128, column:column + 128] = (block / scale).to(torch.float8_e4m3fn)
                made[f"{name}_scale_inv"][row // 128, column // 128] = scale
    return made


def reference_log_probs(model: Path, tensors: dict[str, torch.Tensor], prompt: list[int], answer: list[int],
                        temperature: float) -> torch.Tensor:
    """f32[len(answer)]: what transformers gives these tokens, temperature applied."""
    with TemporaryDirectory() as folder:
        shutil.copy(model / "config.json", folder)
        save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1:-1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]


@dataclass
class FakeTrainer:
    """What WeightSync needs of a trainer: the spec of its model, and this rank's shards of `weights`."""

    model: Path
    layout: Layout
    coord: Coord
    te: bool = False

    def __post_init__(self):
        self.spec = model_spec(read_config(self.model))
        self.plans = local_params(self.spec, self.layout, self.coord, self.te)
        self.params = {plan.name: torch.zeros(plan.shape) for plan in self.plans}

    def local_params(self) -> dict[str, torch.Tensor]:
        return self.params

    def become(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take on these weights, in place as training does; vocabulary padding gets NaN, which must never leave."""
        for plan in self.plans:
            self.params[plan.name].fill_(float("nan"))
            for piece in plan.pieces:
                piece.of_local(self.params[plan.name]).copy_(piece.of_hf(tensors[piece.hf]))
