"""Tiny Hugging Face models, and all ranks of a layout played in one process."""
from __future__ import annotations

import json
from math import lcm
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from mrl.reshard import (
    Coord, Layout, ModelSpec, ParamPlan, duplicates, family_of, hf_tensors, local_params, model_spec,
)
from mrl.reshard.load import load_hf

# No two sizes are equal, so that a transpose or a swapped dimension cannot go unnoticed.
SIZES = dict(
    vocab_size=131, hidden_size=24, intermediate_size=40, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-6,
)
_EXPERTS = dict(num_hidden_layers=2, moe_intermediate_size=28, num_experts_per_tok=3)
_DEEPSEEK = dict(
    _EXPERTS, num_key_value_heads=4, num_experts_per_tok=4, n_routed_experts=8, n_shared_experts=2, n_group=4,
    topk_group=2, first_k_dense_replace=1, kv_lora_rank=14, qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=9,
)
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
    "deepseek-v2": ("DeepseekV2ForCausalLM", dict(_DEEPSEEK, q_lora_rank=None)),
    "deepseek-v3": ("DeepseekV3ForCausalLM", dict(_DEEPSEEK, q_lora_rank=12, num_nextn_predict_layers=1)),
    "deepseek-v3-mtp": ("DeepseekV3ForCausalLM", dict(
        _DEEPSEEK, num_hidden_layers=4, q_lora_rank=12, num_nextn_predict_layers=1)),
    "glm4": ("Glm4ForCausalLM", dict(head_dim=10, attention_bias=True, pad_token_id=0)),
    "glm4-moe": ("Glm4MoeForCausalLM", dict(
        _EXPERTS, head_dim=10, attention_bias=True, use_qk_norm=True, n_routed_experts=8, n_shared_experts=1,
        first_k_dense_replace=1, pad_token_id=0)),
    "gpt-oss": ("GptOssForCausalLM", dict(
        num_hidden_layers=4, num_local_experts=8, num_experts_per_tok=3, head_dim=10, attention_bias=True,
        pad_token_id=0, rope_parameters=dict(rope_type="yarn", factor=32.0, rope_theta=15e4))),
    "gemma3": ("Gemma3ForCausalLM", dict(head_dim=10, sliding_window=16, pad_token_id=0)),
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

# For models with experts and at least four layers, besides these.
DEEP_EXPERT_LAYOUTS = [
    *(Layout(tp=tp, pp=2, dp=lcm(tp, ep * etp) // tp, ep=ep, etp=etp, vpp=2)
      for tp in (1, 2, 4) for ep in (1, 2, 4) for etp in (1, 2)),
    Layout(tp=2, pp=3, ep=2, first_stage_layers=2), Layout(tp=2, pp=2, etp=2, last_stage_layers=1),
]


def layouts_of(variant: str) -> list[Layout]:
    """Those that the variant can be cut into."""
    architecture, changes = VARIANTS[variant]
    if not family_of({"architectures": [architecture]}).moe:
        return LAYOUTS
    return EXPERT_LAYOUTS + (DEEP_EXPERT_LAYOUTS if changes["num_hidden_layers"] == 4 else [])


CASES = [(variant, layout) for variant in VARIANTS for layout in layouts_of(variant)]

Shards = dict[Coord, dict[str, torch.Tensor]]


def hf_config(variant: str) -> dict:
    """A config.json for `variant`, without transformers."""
    architecture, changes = VARIANTS[variant]
    return {"architectures": [architecture], **SIZES, **changes}


def spec_of(variant: str, config: dict | None = None) -> ModelSpec:
    """The spec of a variant, from a config.json of its own or the given one."""
    return model_spec(config or hf_config(variant), mtp="keep" if variant.endswith("-mtp") else "drop")


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
        for module in model.modules():
            if hasattr(module, "e_score_correction_bias"):  # float32 in published checkpoints, whatever the rest is
                module.e_score_correction_bias = torch.randn(module.e_score_correction_bias.shape)
    model.save_pretrained(directory, max_shard_size=shard_size)
    add_prediction_layers(directory, spec_of(variant), dtype)
    return directory


def add_prediction_layers(directory: Path, spec: ModelSpec, dtype: torch.dtype) -> None:
    """What transformers does not build of a model whose multi-token-prediction layers are kept."""
    if not spec.mtp_layers:
        return
    index = directory / "model.safetensors.index.json"
    names = json.loads(index.read_text()) if index.exists() else {"weight_map": {}}
    file = directory / (max(names["weight_map"].values(), default="model.safetensors"))
    tensors = load_file(file)
    beginning = f"model.layers.{spec.num_layers}."
    for name, shape in hf_tensors(spec).items():
        if name.startswith(beginning) and name not in duplicates(spec):
            tensors[name] = torch.randn(shape, dtype=torch.float32 if name.endswith("correction_bias") else dtype)
    everything = {}
    for part in directory.glob("*.safetensors"):
        everything.update(load_file(part))
    tensors.update({again: everything[original].clone() for again, original in duplicates(spec).items()})
    save_file(tensors, file, metadata={"format": "pt"})
    if index.exists():
        names["weight_map"].update(dict.fromkeys(tensors, file.name))
        index.write_text(json.dumps(names))


def empty_params(plans: list[ParamPlan], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What a rank's model holds before loading: NaN everywhere."""
    return {
        plan.name: torch.full(plan.shape, float("nan"), dtype=getattr(torch, plan.dtype) if plan.dtype else dtype)
        for plan in plans
    }


def load_all(directory: Path, spec: ModelSpec, layout: Layout, te: bool, dtype: torch.dtype) -> Shards:
    """What every rank of one replica holds after loading. Unwritten elements would be NaN."""
    shards: Shards = {}
    for coord in layout.shards():
        plans = local_params(spec, layout, coord, te)
        shards[coord] = empty_params(plans, dtype)
        load_hf(directory, shards[coord], plans, spec)
    return shards


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Equal names, dtypes, shapes and bits."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and actual[name].shape == tensor.shape, name
        assert torch.equal(actual[name], tensor), name
