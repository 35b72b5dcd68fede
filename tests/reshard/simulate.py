"""Tiny Hugging Face models, and all ranks of a layout played in one process."""
from __future__ import annotations

from math import lcm
from pathlib import Path

import torch

from mrl.reshard import Coord, Layout, ModelSpec, family_of, local_params
from mrl.reshard.load import load_hf

# No two sizes are equal, so that a transpose or a swapped dimension cannot go unnoticed.
SIZES = dict(
    vocab_size=131, hidden_size=24, intermediate_size=40, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-6,
)
_EXPERTS = dict(num_hidden_layers=2, moe_intermediate_size=28, num_experts_per_tok=3)
VARIANTS = {
    "llama": ("LlamaForCausalLM", dict(tie_word_embeddings=False)),
    "llama-mha-tied": ("LlamaForCausalLM", dict(num_key_value_heads=4, tie_word_embeddings=True)),
    "qwen2": ("Qwen2ForCausalLM", dict(tie_word_embeddings=False)),
    "qwen2-mqa-tied": ("Qwen2ForCausalLM", dict(num_key_value_heads=1, tie_word_embeddings=True)),
    "qwen3": ("Qwen3ForCausalLM", dict(head_dim=10, tie_word_embeddings=False)),
    "qwen3-tied": ("Qwen3ForCausalLM", dict(head_dim=10, num_attention_heads=8, tie_word_embeddings=True)),
    "mistral": ("MistralForCausalLM", dict(head_dim=10, sliding_window=None, tie_word_embeddings=False)),
    "qwen3-moe": ("Qwen3MoeForCausalLM", dict(_EXPERTS, num_experts=8, head_dim=10, tie_word_embeddings=True)),
    "qwen2-moe": ("Qwen2MoeForCausalLM", dict(_EXPERTS, num_experts=8, shared_expert_intermediate_size=36)),
    "mixtral": ("MixtralForCausalLM", dict(num_hidden_layers=2, num_local_experts=8, num_experts_per_tok=3)),
}
LAYOUTS = [
    *(Layout(tp=tp, pp=pp) for pp in (1, 2) for tp in (1, 2, 4)),
    Layout(tp=2, pp=2, vpp=2), Layout(pp=2, last_stage_layers=1), Layout(tp=2, pp=3, first_stage_layers=2),
]
# Each with the fewest ranks that it can have; in REPEATED, everything is there more than once.
REPEATED = Layout(tp=2, pp=2, dp=4, ep=2, etp=2)
EXPERT_LAYOUTS = [
    Layout(tp=tp, pp=pp, dp=lcm(tp, ep * etp) // tp, ep=ep, etp=etp)
    for pp in (1, 2) for tp in (1, 2, 4) for ep in (1, 2, 4) for etp in (1, 2)
] + [REPEATED, Layout(pp=2, dp=2, ep=2, first_stage_layers=1)]

CASES = [
    (variant, layout)
    for variant, (architecture, _) in VARIANTS.items()
    for layout in (EXPERT_LAYOUTS if family_of({"architectures": [architecture]}).moe else LAYOUTS)
]

Shards = dict[Coord, dict[str, torch.Tensor]]


def hf_config(variant: str) -> dict:
    """A config.json for `variant`, without transformers."""
    architecture, changes = VARIANTS[variant]
    return {"architectures": [architecture], **SIZES, **changes}


def save_model(directory: Path, variant: str, dtype: torch.dtype = torch.float32, shard_size: str = "1GB") -> Path:
    """Writes a random model with transformers; every parameter differs from every other, norms and biases too."""
    import transformers

    architecture, changes = VARIANTS[variant]
    model_class = getattr(transformers, architecture)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**{**SIZES, **changes})).to(dtype)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_()
    model.save_pretrained(directory, max_shard_size=shard_size)
    return directory


def load_all(directory: Path, spec: ModelSpec, layout: Layout, te: bool, dtype: torch.dtype) -> Shards:
    """What every rank of one replica holds after loading. Unwritten elements would be NaN."""
    shards: Shards = {}
    for coord in layout.shards():
        plans = local_params(spec, layout, coord, te)
        shards[coord] = {plan.name: torch.full(plan.shape, float("nan"), dtype=dtype) for plan in plans}
        load_hf(directory, shards[coord], plans, spec)
    return shards


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Equal names, dtypes, shapes and bits."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and actual[name].shape == tensor.shape, name
        assert torch.equal(actual[name], tensor), name
