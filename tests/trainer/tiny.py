"""Tiny random Hugging Face models and a fixed batch, with what transformers makes of it: the truth for the trainer."""
from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Iterable, Sequence

import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from mrl.reshard import model_spec, read_config
from tests.reshard.simulate import add_prediction_layers

VOCAB = 131  # prime: no tensor-parallel size or padding divides it
TEMPERATURE = 0.7
LENGTHS = (9, 1, 17, 4, 30, 12, 2)

_SIZES = dict(vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_hidden_layers=4, num_attention_heads=4,
              num_key_value_heads=2, max_position_embeddings=256)
_EXPERTS = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=28)
_LATENT = dict(_SIZES, num_key_value_heads=4, kv_lora_rank=20, qk_nope_head_dim=10, qk_rope_head_dim=8, v_head_dim=14,
               moe_intermediate_size=28, n_routed_experts=8, n_shared_experts=2, first_k_dense_replace=1,
               tie_word_embeddings=False)

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
    # Of the first, the query is projected at once, and groups are chosen by their best expert; of the second, the query
    # has a latent too, groups are chosen by the two best, and yarn scales the softmax.
    "deepseek_v2": lambda: DeepseekV2Config(**_LATENT, q_lora_rank=None, num_experts_per_tok=3, n_group=4, topk_group=3,
                                            topk_method="group_limited_greedy", routed_scaling_factor=1.5),
    "deepseek_v3": lambda: DeepseekV3Config(**_LATENT, q_lora_rank=24, num_experts_per_tok=4, n_group=4, topk_group=2,
                                            rope_parameters={
        "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}),
    "glm4_moe": lambda: Glm4MoeConfig(**_SIZES, head_dim=16, attention_bias=True, use_qk_norm=True, n_routed_experts=8,
                                      num_experts_per_tok=3, moe_intermediate_size=28, first_k_dense_replace=1,
                                      routed_scaling_factor=1.5, tie_word_embeddings=False, pad_token_id=None),
}
EXPERT_FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v2", "deepseek_v3", "glm4_moe")
SEEDS = {"qwen3_moe": 6, "qwen2_moe": 2, "mixtral": 1, "deepseek_v2": 3, "deepseek_v3": 2, "glm4_moe": 4}
"""Of the random parameters; with these, every token is far from other experts than its own (see `watch_routers`)."""
MARGIN = 1e-3
"""Relative change of a router's input that may not change any choice: rounding decides nothing."""


def families(parallel: dict, known: Iterable[str] = tuple(CONFIGS)) -> list[str]:
    """Those of the `known` families that can be cut like this."""
    found = list(known)
    if parallel.get("ep", 1) > 1 or parallel.get("etp", 1) > 1:
        found = [family for family in found if family in EXPERT_FAMILIES]
    if parallel.get("tp", 1) > 1 and not parallel.get("sequence_parallel"):
        found = [family for family in found if family not in EXPERT_FAMILIES]
    return found


def make_model(family: str, directory: Path, seed: int | None = None) -> Path:
    """Save a model of `family` with every parameter random (also norms and biases, which start at 1 and 0)."""
    torch.manual_seed(SEEDS.get(family, len(family)) if seed is None else seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
    path = directory / family
    model.save_pretrained(path)
    add_prediction_layers(path, model_spec(read_config(path), mtp="keep"), torch.float32)
    return path


def make_batch(vocab: int = VOCAB, lengths: Sequence[int] = LENGTHS) -> list[dict[str, torch.Tensor]]:
    """Samples with the fields that `loss_fn` uses; the weights sum to 1."""
    generator = torch.Generator().manual_seed(3)
    batch = [{"tokens": torch.randint(0, vocab, (length,), generator=generator),
              "weights": torch.rand(length, generator=generator),
              "advantages": torch.randn(length, generator=generator)} for length in lengths]
    total = sum(float(sample["weights"].sum()) for sample in batch)
    return [{**sample, "weights": sample["weights"] / total} for sample in batch]


def loss_fn(log_probs: torch.Tensor, entropy: torch.Tensor, fields: dict[str, torch.Tensor]):
    """A policy-gradient loss with an entropy bonus; metrics of both kinds."""
    loss = (fields["weights"] * (-fields["advantages"] * log_probs - 0.1 * entropy)).sum()
    return loss, {"tokens": log_probs.new_tensor(len(log_probs)), "advantage_max": fields["advantages"].max()}


def truth(path: Path, batch: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """log-probs, entropy, loss and gradients as transformers and autograd give them, one sample at a time."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    watch_routers(model)
    log_probs, entropies, total = [], [], torch.zeros(())
    for sample in batch:
        logits = model(sample["tokens"][None]).logits[0, :-1] / TEMPERATURE
        log_p = logits.log_softmax(-1)
        first = torch.zeros(1)
        log_prob = torch.cat([first, log_p.gather(1, sample["tokens"][1:, None])[:, 0]])
        entropy = torch.cat([first, -(log_p.exp() * log_p).sum(-1)])
        total = total + loss_fn(log_prob, entropy, sample)[0]
        log_probs.append(log_prob.detach())
        entropies.append(entropy.detach())
    total.backward()
    return {"log_probs": log_probs, "entropies": entropies, "loss": total.item(), "gradients": saved_gradients(model)}


def watch_routers(model: PreTrainedModel) -> None:
    """From now on, assert in every forward pass that every token is far from other experts than its own."""
    for module in model.modules():
        if type(module).__name__.endswith("Router"):
            module.register_forward_hook(_check_margin)


def _check_margin(router: torch.nn.Module, inputs: tuple[torch.Tensor], output: tuple[torch.Tensor, ...]) -> None:
    chosen = output[-1].sort().values
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(5):
            nearby = inputs[0] * (1 + MARGIN * torch.randn(inputs[0].shape, generator=noise))
            assert torch.equal(router.forward(nearby)[-1].sort().values, chosen), "use another seed"


@torch.no_grad()
def saved_gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Gradients by the names that tensors have in a saved model, where experts are not stacked as they are in memory.

    Overwrites the parameters. Buffers count as 0.
    """
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.zero_()
    for parameter in model.parameters():
        parameter.copy_(parameter.grad)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        return load_file(f"{directory}/model.safetensors")

