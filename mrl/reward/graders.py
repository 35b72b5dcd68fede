"""From the keys of a part to its grader. Only the libraries of the kinds in use are imported."""
from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from mrl.reward.api import Grader

_CLASSES = {
    "math": "MathGrader", "gsm8k": "Gsm8kGrader", "multiple_choice": "MultipleChoiceGrader", "exact": "ExactGrader",
    "code": "CodeGrader", "rouge": "RougeGrader", "format": "FormatGrader", "length": "LengthGrader",
    "reasoning_gym": "ReasoningGymGrader", "custom": "CustomGrader",
}


def make_grader(part: Mapping[str, Any]) -> Grader:
    """The grader of a part, whose keys are given as plain values: `mrl.reward.<kind>` has its class."""
    module = importlib.import_module(f"mrl.reward.{part['kind']}")
    return getattr(module, _CLASSES[part["kind"]])(SimpleNamespace(**part))
