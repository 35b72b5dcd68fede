"""What a Hugging Face config.json says about a model, in the terms the rest of mrl uses.

The trainer builds its Megatron model from a `ModelSpec`, the reshard rules take tensor shapes from it. Anything in a
config.json that would make the model compute something else than these numbers say is refused here, by key and value.
"""
from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from typing import Any, Mapping

from mrl.reshard.families import family_of
from mrl.reshard.layout import Layout
from mrl.reshard.rules import Family, MoeKeys

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
_COMMON_REQUIREMENTS = (
    ("hidden_act", "silu"), ("attention_dropout", 0.0), ("partial_rotary_factor", 1.0), ("quantization_config", None),
)


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Routed experts, on every layer. `ffn` is the width of one, `shared_ffn` of the expert that sees every token."""

    num_experts: int
    top_k: int
    ffn: int
    shared_ffn: int | None
    norm_topk_prob: bool
    """Whether the weights of a token's `top_k` experts are scaled to sum to 1."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model's sizes and switches. Sizes count elements; `vocab` is the true, unpadded vocabulary.

    `ffn` is the width of a dense layer's MLP; a model with `moe` has no such layer.
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
    moe: MoeSpec | None = None

    @property
    def qkv_bias(self) -> bool:
        """Biases on the q, k and v projections (on nothing else)."""
        return self.family.qkv_bias

    @property
    def qk_norm(self) -> bool:
        """An RMS norm on every query and key head, before the rotary embedding."""
        return self.family.qk_norm

    @property
    def q_size(self) -> int:
        """Rows of q_proj."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of k_proj, and of v_proj."""
        return self.kv_heads * self.head_dim

    def require_trainable(self) -> None:
        """ValueError, saying why, for a model that the trainer cannot build."""
        if not self.family.trainable:
            raise ValueError(f"{self.family.architecture} cannot be trained: {self.family.untrainable}")


def read_config(model_dir: str | Path) -> dict[str, Any]:
    """config.json of a model directory. FileNotFoundError or ValueError naming the path."""
    path = Path(model_dir) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found: model.path must be a Hugging Face model directory")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def model_spec(hf_config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config.json. ValueError listing every key that is missing, malformed or not supported."""
    family = family_of(hf_config)
    config = {"head_dim": None, **dict(family.defaults), **hf_config}
    problems = _unsupported(config, family)

    sizes = {name: _size(config, key, problems) for name, key in _SIZES.items()}
    heads, hidden = sizes["heads"], sizes["hidden"]
    kv_heads = _size(config, "num_key_value_heads", problems, null=heads)
    head_dim = _size(config, "head_dim", problems, null=hidden // heads)
    if config["head_dim"] is None and hidden % heads:
        problems.append(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}: head_dim is missing")
    if heads % kv_heads:
        problems.append(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if config.get("rms_norm_eps") is None:
        problems.append("rms_norm_eps is missing")
    rope_theta, rope_scaling = _rope(config, problems)
    moe = _moe(config, family.moe, problems) if family.moe else None
    if problems:
        raise ValueError("config.json: " + "; ".join(problems))
    return ModelSpec(
        family=family, **sizes, kv_heads=kv_heads, head_dim=head_dim, norm_eps=float(config["rms_norm_eps"]),
        tied=bool(config.get("tie_word_embeddings", False)), rope_theta=rope_theta, rope_scaling=rope_scaling,
        max_positions=config.get("max_position_embeddings"), moe=moe,
    )


def layout_problems(spec: ModelSpec, layout: Layout) -> list[str]:
    """Why this model cannot be cut this way, one sentence each; empty when it can."""
    tp = layout.tp
    problems = layout.pipeline_problems(spec.num_layers)
    if spec.heads % tp:
        problems.append(f"tp {tp} does not divide num_attention_heads {spec.heads}")
    if spec.kv_heads % tp and tp % spec.kv_heads:
        problems.append(f"tp {tp} is neither a divisor nor a multiple of num_key_value_heads {spec.kv_heads}")
    elif (spec.q_size + 2 * spec.kv_size) % tp:
        problems.append(f"tp {tp} does not divide the {spec.q_size + 2 * spec.kv_size} rows of q, k and v")
    if spec.moe is None and spec.ffn % tp:
        problems.append(f"tp {tp} does not divide intermediate_size {spec.ffn}")
    return problems + _expert_problems(spec, layout)


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
        problems.append(f"tp {tp} does not divide {keys.shared_ffn} {moe.shared_ffn}")
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
    problems = [
        f"{key} {config[key]!r} is not supported, only {allowed!r}"
        for key, allowed in (*_COMMON_REQUIREMENTS, *family.requires)
        if config.get(key) not in (None, [], allowed)
    ]
    kinds = sorted(set(config.get("layer_types") or []) - {"full_attention"})
    if kinds:
        problems.append(f"layer_types {kinds} are not supported, only 'full_attention'")
    return problems


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
    return MoeSpec(
        num_experts, top_k, ffn=_size(config, keys.ffn, problems),
        shared_ffn=_size(config, keys.shared_ffn, problems) if keys.shared_ffn else None,
        norm_topk_prob=bool(config.get("norm_topk_prob", False)),
    )


def _rope(config: Mapping[str, Any], problems: list[str]) -> tuple[float, dict[str, Any] | None]:
    """Rotary base and scaling: `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    Where a file has both, `rope_scaling` counts, as it does in transformers.
    """
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    theta = rope.pop("rope_theta", None) or config.get("rope_theta") or DEFAULT_ROPE_THETA
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    partial = rope.pop("partial_rotary_factor", 1.0)
    if partial != 1.0:
        problems.append(f"rope_parameters.partial_rotary_factor {partial!r} is not supported, only 1.0")
    scaling = {"rope_type": kind, **rope}
    if problem := rope_problem(scaling):
        problems.append(problem)
    return float(theta), None if kind == "default" else scaling
