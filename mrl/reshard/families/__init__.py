"""The model families mrl knows: one file each, listed here, found by the architecture a config.json names."""
from __future__ import annotations

from typing import Any, Mapping

from mrl.reshard.families.deepseek_v2 import DEEPSEEK_V2
from mrl.reshard.families.deepseek_v3 import DEEPSEEK_V3
from mrl.reshard.families.gemma3 import GEMMA3
from mrl.reshard.families.glm4 import GLM4
from mrl.reshard.families.glm4_moe import GLM4_MOE
from mrl.reshard.families.gpt_oss import GPT_OSS
from mrl.reshard.families.llama import LLAMA
from mrl.reshard.families.mistral import MISTRAL
from mrl.reshard.families.mixtral import MIXTRAL
from mrl.reshard.families.qwen2 import QWEN2
from mrl.reshard.families.qwen2_moe import QWEN2_MOE
from mrl.reshard.families.qwen3 import QWEN3
from mrl.reshard.families.qwen3_moe import QWEN3_MOE
from mrl.reshard.rules import Family

FAMILIES: tuple[Family, ...] = (
    LLAMA, QWEN2, QWEN3, MISTRAL, QWEN2_MOE, QWEN3_MOE, MIXTRAL,
    DEEPSEEK_V2, DEEPSEEK_V3, GLM4, GLM4_MOE, GPT_OSS, GEMMA3,
)


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """The family of a config.json: by `architectures`, or by `model_type` where that is not given.

    ValueError, listing what is known, for any other architecture.
    """
    named = hf_config.get("architectures") or []
    for family in FAMILIES:
        if family.architecture in named or not named and family.model_type == hf_config.get("model_type"):
            return family
    found = f"architectures {named}" if named else f"model_type {hf_config.get('model_type')!r}"
    known = ", ".join(family.architecture for family in FAMILIES)
    raise ValueError(f"config.json: {found} is not supported; known are {known} (docs/adding_a_model.md)")
