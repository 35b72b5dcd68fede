"""What a Hugging Face config.json says about a model, in the terms the rest of mrl uses.

The trainer builds its Megatron model from a `ModelSpec`, the reshard rules take tensor shapes from it. Anything in a
config.json that would make the model compute something else than these numbers say is refused here, by key and value.
"""
from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from typing import Any, Iterator, Mapping, NamedTuple

from mrl.reshard.families import family_of
from mrl.reshard.layout import Layout
from mrl.reshard.rules import Family, MoeKeys, Rule

DEFAULT_ROPE_THETA = 10000.0  # what transformers assumes, unless the family's defaults say otherwise

_SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "heads": "num_attention_heads",
    "vocab": "vocab_size",
}
_ROPE_KINDS = ("default", "linear", "llama3", "yarn")
# Keys of which only one value is implemented, in any family; absent means that value.
COMMON_REQUIREMENTS = (("hidden_act", "silu"), ("attention_dropout", 0.0))


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """Sizes of latent attention: ranks of the latents of query (None: it has none) and of key and value; per head, the
    dimensions of query and key without and with a position, and of the value."""

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int

    @property
    def full_query(self) -> bool:
        """Whether the query is projected without a latent."""
        return self.q_rank is None

    @property
    def qk_dim(self) -> int:
        """Dimensions of a query or key head."""
        return self.nope_dim + self.rope_dim

    @property
    def kv_up_dim(self) -> int:
        """Rows of the projection from the latent to key and value, per head."""
        return self.nope_dim + self.v_dim

    @property
    def kv_down_dim(self) -> int:
        """Rows of the projection to the latent of key and value, and to the part of the key that all heads share."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Routed experts. `ffn` is the width of one, `shared_ffn` of the expert that sees every token."""

    num_experts: int
    top_k: int
    ffn: int
    shared_ffn: int | None
    norm_topk_prob: bool
    """Whether the weights of a token's `top_k` experts are scaled to sum to 1."""
    shared_gate: bool = False
    """Whether each token weighs the shared expert with a gate."""
    dense_layers: int = 0
    """Leading layers that have an ordinary MLP instead."""
    scoring: str = "softmax"
    """"softmax" or "sigmoid": what turns a router's logits into scores."""
    bias: bool = False
    """Whether a bias, not trained by gradients, is added to the scores that choose experts (not to their weights)."""
    scaling: float = 1.0
    """Factor of the routed experts' weights."""
    groups: int = 1
    top_groups: int = 1
    """A token's experts come from `top_groups` of `groups` groups, those with the highest sums of …"""
    group_best: int = 1
    """… so many best scores."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model's sizes and switches. Sizes count elements; `vocab` is the true, unpadded vocabulary.

    `ffn` is the width of a dense layer's MLP. With latent attention (`mla`) `head_dim` is that of query and key.
    """

    family: Family
    num_layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    norm_eps: float
    tied: bool
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None = field(hash=False)
    """As Hugging Face defines it, with "rope_type" as the key of the kind; None for plain rotary embeddings."""
    max_positions: int | None
    """`max_position_embeddings`: the context the model was made for; None where the config does not say."""
    qkv_bias: bool
    """Biases on the q, k and v projections."""
    qk_norm: bool
    """An RMS norm on every query and key head, before the rotary embedding."""
    rotary_fraction: float = 1.0
    """The first part of every head that the rotary embedding turns."""
    mla: MlaSpec | None = None
    moe: MoeSpec | None = None
    mtp_layers: int = 0
    """Multi-token-prediction layers that are kept: loaded, synced and exported, though never trained."""

    @property
    def q_size(self) -> int:
        """Rows of q_proj."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of k_proj, and of v_proj."""
        return self.kv_heads * self.head_dim

    def layer_rules(self, layer: int) -> Iterator[Rule]:
        """The rules of one layer; layers count over the whole model, `mtp_layers` behind the others."""
        if layer >= self.num_layers:
            rules = self.family.mtp
        elif self.moe and layer < self.moe.dense_layers:
            rules = self.family.dense_layer
        else:
            rules = self.family.layer
        return (rule for rule in rules if rule.applies(self))

    @property
    def untrainable(self) -> str | None:
        """Why the trainer cannot build it; None when it can."""
        if self.family.untrainable:
            return self.family.untrainable
        moe = self.moe
        if moe and moe.groups > 1 and moe.top_k // moe.top_groups != moe.group_best:
            return (f"its groups of experts are chosen by their {moe.group_best} best, in megatron-core by "
                    f"{moe.top_k // moe.top_groups}")
        return None

    def require_trainable(self) -> None:
        """ValueError, saying why, for a model that the trainer cannot build."""
        if self.untrainable:
            raise ValueError(f"{self.family.architecture} cannot be trained: {self.untrainable}")


def read_config(model_dir: str | Path) -> dict[str, Any]:
    """config.json of a model directory. FileNotFoundError or ValueError naming the path."""
    path = Path(model_dir) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found: model.path must be a Hugging Face model directory")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def model_spec(hf_config: Mapping[str, Any], mtp: str = "drop") -> ModelSpec:
    """The spec of a config.json. ValueError listing every key that is missing, malformed or not supported.

    `mtp`: "keep" or "drop" the layers that predict further tokens, where a checkpoint has some.
    """
    family = family_of(hf_config)
    config = {"head_dim": None, **dict(family.defaults), **hf_config}
    problems = _unsupported(config, family)

    sizes = {name: _size(config, key, problems) for name, key in _SIZES.items()}
    mla = _mla(config, problems) if family.mla else None
    kv_heads, head_dim = _heads(config, sizes["hidden"], sizes["heads"], mla, problems)
    if config.get("rms_norm_eps") is None:
        problems.append("rms_norm_eps is missing")
    rope = _rope(config, family, problems)
    moe = _moe(config, family.moe, problems) if family.moe else None
    tied = bool(config.get("tie_word_embeddings", False))
    mtp_layers = int(config.get("num_nextn_predict_layers") or 0) if mtp == "keep" and family.mtp else 0
    if tied and mtp_layers:
        problems.append("tie_word_embeddings True is not supported with multi-token-prediction layers kept")
    if problems:
        raise ValueError("config.json: " + "; ".join(problems))
    return ModelSpec(
        family=family, **sizes, kv_heads=kv_heads, head_dim=head_dim, norm_eps=float(config["rms_norm_eps"]),
        tied=tied, rope_theta=rope.theta, rope_scaling=rope.scaling, rotary_fraction=rope.fraction,
        max_positions=config.get("max_position_embeddings"), qkv_bias=_switch(config, family.qkv_bias),
        qk_norm=_switch(config, family.qk_norm), mla=mla, moe=moe, mtp_layers=mtp_layers,
    )


def layout_problems(spec: ModelSpec, layout: Layout, attention_tp: int | None = None) -> list[str]:
    """Why this model cannot be cut this way, one sentence each; empty when it can.

    attention_tp: parts into which attention is cut, if not `layout.tp`.
    """
    tp = layout.tp
    problems = layout.pipeline_problems(spec.num_layers) + _attention_problems(spec, attention_tp or tp)
    if (spec.moe is None or spec.moe.dense_layers) and spec.ffn % tp:
        problems.append(f"tp {tp} does not divide intermediate_size {spec.ffn}")
    if spec.mtp_layers and spec.hidden % tp:
        problems.append(f"tp {tp} does not divide hidden_size {spec.hidden}")
    return problems + _expert_problems(spec, layout)


def _attention_problems(spec: ModelSpec, tp: int) -> list[str]:
    problems = []
    if spec.heads % tp:
        problems.append(f"tp {tp} does not divide num_attention_heads {spec.heads}")
    if spec.mla:
        sizes = {"q_lora_rank": spec.mla.q_rank or 0, "kv_lora_rank + qk_rope_head_dim": spec.mla.kv_down_dim}
        problems += [f"tp {tp} does not divide {name} {size}" for name, size in sizes.items() if size % tp]
    elif spec.kv_heads % tp and tp % spec.kv_heads:
        problems.append(f"tp {tp} is neither a divisor nor a multiple of num_key_value_heads {spec.kv_heads}")
    elif (spec.q_size + 2 * spec.kv_size) % tp:
        problems.append(f"tp {tp} does not divide the {spec.q_size + 2 * spec.kv_size} rows of q, k and v")
    return problems


def _expert_problems(spec: ModelSpec, layout: Layout) -> list[str]:
    tp, ep, etp, moe, keys = layout.tp, layout.ep, layout.etp, spec.moe, spec.family.moe
    if moe is None:
        sizes = {"ep": ep, "etp": etp}
        return [f"{name} {size} divides experts, and the model has none" for name, size in sizes.items() if size > 1]
    problems = []
    if moe.num_experts % ep:
        problems.append(f"ep {ep} does not divide the number of experts {moe.num_experts}")
    if moe.ffn % etp:
        problems.append(f"etp {etp} does not divide {keys.ffn} {moe.ffn}")
    if moe.shared_ffn and moe.shared_ffn % tp:
        name = keys.shared_ffn or f"the width of {keys.shared_count}"
        problems.append(f"tp {tp} does not divide {name} {moe.shared_ffn}")
    return problems


def rope_problem(rope: Mapping[str, Any]) -> str | None:
    """Why these rotary embeddings are not supported, if they are not.

    Only frequencies that are the same for every sequence are, and no scaling of attention besides them.
    `rope`: as transformers defines it, with the kind under "rope_type".
    """
    kind = rope["rope_type"]
    if kind not in _ROPE_KINDS:
        return f"rope_type {kind!r} is not supported; supported: {', '.join(_ROPE_KINDS)} (with attention_factor 1)"
    if kind == "yarn" and rope.get("factor") is None:
        return "rope_type 'yarn' has no factor"
    if kind == "yarn" and (scale := _yarn_attention_factor(rope)) != 1.0:
        return (f"rope_type 'yarn' scales attention by {scale:.4g}, which is not supported; only an attention_factor "
                "of 1 is")
    return None


def _yarn_attention_factor(rope: Mapping[str, Any]) -> float:
    """What transformers multiplies queries and keys by (Peng et al. 2023, as in its `_compute_yarn_parameters`)."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def scale(weight: float) -> float:
        return 0.1 * weight * log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return scale(1.0)


def _unsupported(config: Mapping[str, Any], family: Family) -> list[str]:
    asked = {**dict(COMMON_REQUIREMENTS), **dict(family.requires)}
    problems = [
        f"{key} {config[key]!r} is not supported, only {allowed!r}"
        for key, allowed in asked.items() if config.get(key) not in (None, [], allowed)
    ]
    if quantized := config.get("quantization_config"):
        method = quantized.get("quant_method", "a quantised format")
        problems.append(f"quantization_config: weights in {method} are not supported, only bfloat16, float16 and "
                        "float32: take or make a checkpoint in one of these")
    kinds = sorted(set(config.get("layer_types") or []) - set(family.layer_types))
    if kinds:
        problems.append(f"layer_types {kinds} are not supported, only {', '.join(map(repr, family.layer_types))}")
    return problems


def _switch(config: Mapping[str, Any], switch: bool | str) -> bool:
    """A switch of a family: its value, or that of the key it names."""
    return bool(config.get(switch, False)) if isinstance(switch, str) else switch


def _heads(
    config: Mapping[str, Any], hidden: int, heads: int, mla: MlaSpec | None, problems: list[str],
) -> tuple[int, int]:
    """Number of key and value heads, and the dimensions of a head."""
    kv_heads = _size(config, "num_key_value_heads", problems, null=heads)
    if mla:
        if kv_heads != heads:
            problems.append(f"num_key_value_heads {kv_heads} must be num_attention_heads {heads} in latent attention")
        return heads, mla.qk_dim
    head_dim = _size(config, "head_dim", problems, null=hidden // heads)
    if config["head_dim"] is None and hidden % heads:
        problems.append(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}: head_dim is missing")
    if heads % kv_heads:
        problems.append(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    return kv_heads, head_dim


def _mla(config: Mapping[str, Any], problems: list[str]) -> MlaSpec:
    return MlaSpec(
        q_rank=None if config.get("q_lora_rank") is None else _size(config, "q_lora_rank", problems),
        kv_rank=_size(config, "kv_lora_rank", problems), nope_dim=_size(config, "qk_nope_head_dim", problems),
        rope_dim=_size(config, "qk_rope_head_dim", problems), v_dim=_size(config, "v_head_dim", problems),
    )


def _size(config: Mapping[str, Any], key: str, problems: list[str], null: int | None = None) -> int:
    """A positive integer of the config; `null` is what an explicit null stands for, if anything.

    Returns 1 after noting a problem, so that the checks behind it can go on.
    """
    value = config.get(key)
    if value is None and key in config and null:
        return null
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    problems.append(f"{key} is missing" if key not in config else f"{key} {value!r} must be a positive integer")
    return 1


def _moe(config: Mapping[str, Any], keys: MoeKeys, problems: list[str]) -> MoeSpec:
    """The experts of a config, whose sizes are under `keys`."""
    found = [key for key in keys.num_experts if key in config] or keys.num_experts
    num_experts = _size(config, found[0], problems)
    top_k = _size(config, "num_experts_per_tok", problems)
    if top_k > num_experts:
        problems.append(f"num_experts_per_tok {top_k} is more than the number of experts {num_experts}")
    ffn, shared_ffn = _size(config, keys.ffn, problems), None
    if keys.shared_ffn:
        shared_ffn = _size(config, keys.shared_ffn, problems)
    elif keys.shared_count:
        shared_ffn = ffn * _size(config, keys.shared_count, problems)
    groups, top_groups = _groups(config, keys, num_experts, problems)
    return MoeSpec(
        num_experts, top_k, ffn, shared_ffn, norm_topk_prob=bool(config.get("norm_topk_prob", False)),
        shared_gate=keys.shared_gate, dense_layers=int(config.get(keys.dense_layers) or 0),
        scoring=keys.scoring, bias=keys.bias, scaling=float(config.get("routed_scaling_factor", 1.0)),
        groups=groups, top_groups=top_groups, group_best=keys.group_best if groups > 1 else 1,
    )


def _groups(config: Mapping[str, Any], keys: MoeKeys, num_experts: int, problems: list[str]) -> tuple[int, int]:
    """Groups of experts, and how many of them serve a token; 1 and 1 where all experts are one."""
    if keys.groups is None or keys.group_method and config.get(keys.group_method[0]) != keys.group_method[1]:
        return 1, 1
    groups, chosen = (config.get(key) or 1 for key in keys.groups)
    if num_experts % groups or not 1 <= chosen <= groups:
        problems.append(f"{keys.groups[0]} {groups} and {keys.groups[1]} {chosen} do not fit {num_experts} experts")
    return groups, chosen


class _Rope(NamedTuple):
    theta: float
    scaling: dict[str, Any] | None
    fraction: float


def _rope(config: Mapping[str, Any], family: Family, problems: list[str]) -> _Rope:
    """Rotary embedding: `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    Where a file has both, `rope_scaling` counts, as it does in transformers. Where it differs by kind of layer, that of
    full attention is meant. What a model that cannot be trained asks for is not judged.
    """
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    rope = dict(rope.get("full_attention", rope))
    theta = rope.pop("rope_theta", None) or config.get("rope_theta") or DEFAULT_ROPE_THETA
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    fraction = float(rope.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0)
    if fraction != 1.0 and not family.partial_rotary:
        problems.append(f"partial_rotary_factor {fraction!r} is not supported, only 1.0")
    scaling = {"rope_type": kind, **rope}
    if family.trainable and (problem := rope_problem(scaling)):
        problems.append(problem)
    return _Rope(float(theta), None if kind == "default" else scaling, fraction)
