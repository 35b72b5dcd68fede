"""Tiny random Hugging Face models and a fixed batch, with what transformers makes of it: the truth for the trainer."""
from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Iterable

import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB = 131  # prime: no tensor-parallel size or padding divides it
TEMPERATURE = 0.7
LENGTHS = (9, 1, 17, 4, 30, 12, 2)

_SIZES = dict(vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_hidden_layers=4, num_attention_heads=4,
              num_key_value_heads=2, max_position_embeddings=256)
_EXPERTS = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=28)

CONFIGS = {
    # Head size unlike hidden/heads; the original context of 16 puts frequencies on all three branches of llama3.
    "llama": lambda: LlamaConfig(**_SIZES, head_dim=16, tie_word_embeddings=False, rope_parameters={
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16}),
    "qwen2": lambda: Qwen2Config(**_SIZES, tie_word_embeddings=False, rope_parameters={
        "rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=24, tie_word_embeddings=True),
    "mistral": lambda: MistralConfig(**_SIZES, head_dim=16, sliding_window=None, tie_word_embeddings=False),
    # The weights of a token's experts sum to 1 in the first and the last, not in the second.
    "qwen3_moe": lambda: Qwen3MoeConfig(**_SIZES, **_EXPERTS, head_dim=24, norm_topk_prob=True,
                                        tie_word_embeddings=True),
    "qwen2_moe": lambda: Qwen2MoeConfig(**_SIZES, **_EXPERTS, shared_expert_intermediate_size=36,
                                        norm_topk_prob=False, tie_word_embeddings=False),
    "mixtral": lambda: MixtralConfig(**_SIZES, num_local_experts=8, num_experts_per_tok=3, tie_word_embeddings=False),
}
EXPERT_FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral")
SEEDS = {"qwen3_moe": 1, "qwen2_moe": 2, "mixtral": 1}
"""Of the random parameters; with these, every token is far from other experts than its own (see `check_margin`)."""
MARGIN = 1e-3
"""Least distance between the router logits of the last expert chosen and the next one: rounding decides nothing."""


def families(parallel: dict, known: Iterable[str] = tuple(CONFIGS)) -> list[str]:
    """Those of the `known` families that can be cut like this."""
    found = list(known)
    if parallel.get("ep", 1) > 1 or parallel.get("etp", 1) > 1:
        found = [family for family in found if family in EXPERT_FAMILIES]
    if parallel.get("tp", 1) > 1 and not parallel.get("sequence_parallel"):
        found = [family for family in found if family not in EXPERT_FAMILIES]
    return found


def make_model(family: str, directory: Path) -> Path:
    """Save a model of `family` with every parameter random (also norms and biases, which start at 1 and 0)."""
    torch.manual_seed(SEEDS.get(family, len(family)))
    model = AutoModelForCausalLM.from_config(CONFIGS[family]())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    path = directory / family
    model.save_pretrained(path)
    return path


def make_batch() -> list[dict[str, torch.Tensor]]:
    """Samples with the fields that `loss_fn` uses; the weights sum to 1."""
    generator = torch.Generator().manual_seed(3)
    batch = [{"tokens": torch.randint(0, VOCAB, (length,), generator=generator),
              "weights": torch.rand(length, generator=generator),
              "advantages": torch.randn(length, generator=generator)} for length in LENGTHS]
    total = sum(float(sample["weights"].sum()) for sample in batch)
    return [{**sample, "weights": sample["weights"] / total} for sample in batch]


def loss_fn(log_probs: torch.Tensor, entropy: torch.Tensor, fields: dict[str, torch.Tensor]):
    """A policy-gradient loss with an entropy bonus; metrics of both kinds."""
    loss = (fields["weights"] * (-fields["advantages"] * log_probs - 0.1 * entropy)).sum()
    return loss, {"tokens": log_probs.new_tensor(len(log_probs)), "advantage_max": fields["advantages"].max()}


def truth(path: Path, batch: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """log-probs, entropy, loss and gradients as transformers and autograd give them, one sample at a time."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    log_probs, entropies, total = [], [], torch.zeros(())
    for sample in batch:
        output = model(sample["tokens"][None], output_router_logits=True) if path.name in EXPERT_FAMILIES else model(
            sample["tokens"][None])
        check_margin(getattr(output, "router_logits", ()), model.config)
        logits = output.logits[0, :-1] / TEMPERATURE
        log_p = logits.log_softmax(-1)
        first = torch.zeros(1)
        log_prob = torch.cat([first, log_p.gather(1, sample["tokens"][1:, None])[:, 0]])
        entropy = torch.cat([first, -(log_p.exp() * log_p).sum(-1)])
        total = total + loss_fn(log_prob, entropy, sample)[0]
        log_probs.append(log_prob.detach())
        entropies.append(entropy.detach())
    total.backward()
    return {"log_probs": log_probs, "entropies": entropies, "loss": total.item(), "gradients": saved_gradients(model)}


def check_margin(router_logits: tuple[torch.Tensor, ...], config: Any) -> None:
    """Assert that every token, in every layer, is far from other experts than its own."""
    for logits in router_logits:
        last, following = logits.sort(descending=True).values[:, config.num_experts_per_tok - 1:][:, :2].unbind(1)
        assert (last - following).min() > MARGIN, "use another seed"


@torch.no_grad()
def saved_gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Gradients by the names that tensors have in a saved model, where experts are not stacked as they are in memory.

    Overwrites the parameters.
    """
    for parameter in model.parameters():
        parameter.copy_(parameter.grad)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        return load_file(f"{directory}/model.safetensors")

