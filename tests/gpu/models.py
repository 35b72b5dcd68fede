"""Random models that GPU kernels take (head dim 64 or 128), made on the spot, and what transformers says about them."""
from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.trainer.tiny import TEMPERATURE, loss_fn, saved_gradients
from tools.make_quickstart import make_tokenizer

VOCAB = 131  # prime: no tensor-parallel size or padding divides it
LENGTHS = (90, 1, 170, 40, 300, 120, 2)

_SMALL = dict(vocab_size=VOCAB, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
              num_key_value_heads=2, max_position_embeddings=512)
_EXPERTS = dict(num_experts=8, num_experts_per_tok=4, moe_intermediate_size=128)
SMALL = {
    "llama": lambda: LlamaConfig(**_SMALL, head_dim=64, tie_word_embeddings=False, rope_parameters={
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}),
    "qwen2": lambda: Qwen2Config(**_SMALL, tie_word_embeddings=False),
    "qwen3": lambda: Qwen3Config(**_SMALL, head_dim=128, tie_word_embeddings=True),
    "qwen3_moe": lambda: Qwen3MoeConfig(**_SMALL, **_EXPERTS, head_dim=128, norm_topk_prob=True,
                                        tie_word_embeddings=True),
    "qwen2_moe": lambda: Qwen2MoeConfig(**_SMALL, **_EXPERTS, shared_expert_intermediate_size=256,
                                        tie_word_embeddings=False),
}


def qwen3_0_6b() -> PretrainedConfig:
    """The shape of Qwen3-0.6B."""
    return Qwen3Config(vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
                       num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960,
                       tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6})


def addition_model() -> PretrainedConfig:
    """The quickstart's model, larger, with heads that the engine's attention kernels take."""
    tokenizer = make_tokenizer()
    return Qwen3Config(vocab_size=64, hidden_size=512, intermediate_size=1536, num_hidden_layers=8,
                       num_attention_heads=8, num_key_value_heads=4, head_dim=64, max_position_embeddings=256,
                       tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
                       pad_token_id=tokenizer.pad_token_id)


def save_random(config: PretrainedConfig, path: Path, spread: float, device: str) -> Path:
    """A bfloat16 checkpoint with every parameter random (norms around 1), and a tokenizer of characters."""
    torch.manual_seed(1)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, spread)
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def truth(path: Path, batch, dtype: torch.dtype, device: str, gradients: bool = False) -> dict:
    """log-probs of every sample by itself, in fp32 after the logits; with `gradients`, those of loss_fn by HF name.

    Of a model with experts "experts" too: int16 [T, layers, experts a token] of each sample, as the routers chose; a
    batch that has this field makes them choose so.
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device)
    routers = [module for module in model.modules() if type(module).__name__.endswith("Router")]
    found = {"log_probs": [], **({"experts": []} if routers else {})}
    total = torch.zeros((), device=device)
    with torch.set_grad_enabled(gradients):
        for sample in batch:
            sample = {name: value.to(device) for name, value in sample.items()}
            with routed(routers, sample.get("experts")) as chosen:
                log_p = (model(sample["tokens"][None]).logits[0, :-1].float() / TEMPERATURE).log_softmax(-1)
            first = torch.zeros(1, device=device)
            log_prob = torch.cat([first, log_p.gather(1, sample["tokens"][1:, None])[:, 0]])
            entropy = torch.cat([first, -(log_p.exp() * log_p).sum(-1)])
            total = total + loss_fn(log_prob, entropy, sample)[0]
            found["log_probs"].append(log_prob.detach().cpu())
            if routers:
                found["experts"].append(torch.stack(chosen, dim=1).short().cpu())
    if gradients:
        total.backward()
        found |= {"loss": total.item(), "gradients": saved_gradients(model)}
    return found


@contextmanager
def routed(routers: list[torch.nn.Module], experts: torch.Tensor | None) -> Iterator[list[torch.Tensor]]:
    """Within the block one forward pass sends tokens to these experts, or where the routers choose. Yields the choices
    of every layer: int64 [T, experts a token]."""
    chosen: list[torch.Tensor] = []

    def choose(router, _inputs, output):
        logits, scores, own = output
        chosen.append(own if experts is None else experts[:, len(chosen)].long())
        if experts is None:
            return output
        scores = logits.softmax(-1, dtype=torch.float32).gather(1, chosen[-1])
        if router.norm_topk_prob:
            scores = scores / scores.sum(-1, keepdim=True)
        return logits, scores.to(logits.dtype), chosen[-1]

    handles = [router.register_forward_hook(choose) for router in routers]
    try:
        yield chosen
    finally:
        for handle in handles:
            handle.remove()
