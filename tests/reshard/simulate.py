"""Tiny Hugging Face models, and all ranks of a layout played in one process."""
from __future__ import annotations

import json
from math import lcm
from pathlib import Path
from typing import Iterator

import torch
from safetensors.torch import load_file, save_file

from mrl.reshard import (
    Bucket, Coord, EngineLayout, Layout, ModelSpec, ParamPlan, SliceOutline, SyncPlan, assemble_views, direct_views,
    duplicates, family_of, hf_tensors, local_params, model_spec, pack_views,
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

# Engines of one and of several nodes, with fewer and with more replicas of their own than the trainers have.
ENGINES = [
    EngineLayout("vllm", count=1, tp=1),
    EngineLayout("vllm", count=3, tp=4, gpus_per_node=2),
    EngineLayout("vllm", count=1, tp=2, dp=2, ep=4),
    EngineLayout("sglang", count=2, tp=4, dp=2, ep=2),
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


def one_copy(layout: Layout) -> Iterator[Coord]:
    """Positions that hold one copy of the whole model between them: of each stage the first ranks that hold a copy of
    its experts, or of all the rest, whichever takes more."""
    for stage in range(layout.pp):
        first = layout.sender(stage)
        yield from map(layout.coord, range(first, first + max(layout.tp, layout.ep * layout.etp)))


def load_all(directory: Path, spec: ModelSpec, layout: Layout, te: bool, dtype: torch.dtype) -> Shards:
    """What every rank of one replica holds after loading. Unwritten elements would be NaN."""
    shards: Shards = {}
    for coord in one_copy(layout):
        plans = local_params(spec, layout, coord, te)
        shards[coord] = empty_params(plans, dtype)
        load_hf(directory, shards[coord], plans, spec)
    return shards


def load_everywhere(
    directory: Path, spec: ModelSpec, layout: Layout, te: bool, dtype: torch.dtype = torch.float32,
) -> list[dict[str, torch.Tensor]]:
    """What every rank holds, in rank order: replicas hold copies."""
    ranks: list[dict[str, torch.Tensor]] = []
    for rank in range(layout.world):
        plans = local_params(spec, layout, layout.coord(rank), te)
        ranks.append(empty_params(plans, dtype))
        load_hf(directory, ranks[-1], plans, spec)
    return ranks


class Sync:
    """A sync played in one process: every rank and worker looks only at its own buckets of the plan.

    `run()` gives, by (engine, worker), each HF tensor with the elements the worker received; the others are NaN.
    """

    def __init__(self, plan: SyncPlan, params: list[dict[str, torch.Tensor]]):
        self.plan, self.params = plan, params
        self.senders = [{bucket.index: bucket for bucket in plan.of_rank(rank)} for rank in range(len(params))]
        self.receivers = {
            (engine, worker): {bucket.index: bucket for bucket in plan.of_engine(engine, worker)}
            for engine in range(plan.engine_layout.count) for worker in range(plan.engine_layout.world)}
        self.views: dict[tuple[int, int], list] = {}

    def run(self) -> dict[tuple[int, int], dict[str, torch.Tensor]]:
        received: dict[tuple[int, int], dict[str, torch.Tensor]] = {place: {} for place in self.receivers}
        for outline in self.plan.outline:
            slices = [self._slice(outline.index, at) if brief.nbytes else torch.empty(0)
                      for at, brief in enumerate(outline.slices)]
            for place, buckets in self.receivers.items():
                if outline.index in buckets:
                    assert place[0] in outline.engines and outline.worker in (None, place[1])
                    _apply(buckets[outline.index], slices, received[place])
                else:
                    assert place[0] not in outline.engines or outline.worker not in (None, place[1])
        return received

    def _slice(self, index: int, at: int) -> torch.Tensor:
        """One slice as its sender ships it. The views are made once, like in a run, and their memory is poisoned."""
        if (index, at) not in self.views:
            self.views[index, at] = self._prepare(index, at)
        flat, *copies = self.views[index, at]
        flat.fill_(float("nan"))
        for sources, targets in copies:
            if sources:  # a rank of the group may have nothing to give
                torch._foreach_copy_(targets, sources)
        assert not flat.isnan().any()
        return flat

    def _prepare(self, index: int, at: int) -> list:
        brief = self.plan.outline[index].slices[at]
        one = self.senders[brief.sender][index].slices[at]
        dtype = getattr(torch, self.senders[brief.sender][index].dtype)
        flat = torch.empty(one.numel, dtype=dtype)
        assert brief == SliceOutline(flat.nbytes, flat.nbytes, one.ranks, one.sender) and one.sender in one.ranks
        if len(brief.ranks) == 1:
            return [flat, direct_views(one, self.params[brief.sender], flat)]
        packed = [torch.empty(sum(given.numel for given in shard), dtype=dtype) for shard in one.shards]
        packing = [pack_views(self.senders[rank][index].slices[at].shards[m], self.params[rank], packed[m])
                   for m, rank in enumerate(brief.ranks)]
        assembling = assemble_views(one, packed, flat)
        assert sum(target.numel() for target in assembling[1]) == one.numel
        return [flat, *packing, assembling]


def _apply(bucket: Bucket, slices: list[torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
    """The parts of a bucket, put where they belong; nothing may come twice."""
    for one, flat in zip(bucket.slices, slices, strict=True):
        for part in one.parts:
            tensor = tensors.setdefault(part.name, torch.full(part.shape, float("nan"), dtype=flat.dtype))
            box = tensor[tuple(slice(*span) for span in part.box)]
            assert box.isnan().all(), f"{part.name} {part.box} comes twice"
            box.copy_(flat[part.offset:part.offset + part.numel].view(part.box_shape))


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Equal names, dtypes, shapes and bits."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and actual[name].shape == tensor.shape, name
        assert torch.equal(actual[name], tensor), name
