"""How many tokens a model can hold at once, by its config.json."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def context_limit(hf_config: Mapping[str, Any]) -> int | None:
    """Tokens the model's positions reach; None where config.json does not say. YaRN stretches them by its factor."""
    limit = hf_config.get("max_position_embeddings")
    scaling = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    if limit and scaling.get("rope_type", scaling.get("type")) == "yarn":
        original = scaling.get("original_max_position_embeddings", limit)
        return max(limit, int(original * scaling["factor"]))
    return limit
