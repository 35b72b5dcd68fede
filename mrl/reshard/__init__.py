"""Rules, family tables, layouts and plans: Hugging Face tensors to Megatron shards and back.

Pure functions; nothing here knows torch.distributed. Importing this package does not import torch: `load_hf`,
`export_tensors` and `save_hf`, which read and write checkpoint directories, do so when they are first asked for.
"""
from importlib import import_module
from typing import Any

from mrl.reshard.buckets import DTYPE_BYTES, Bucket, Contribution, Outline, Part, Slice, SliceOutline
from mrl.reshard.engine_layout import EngineLayout, held_boxes
from mrl.reshard.families import FAMILIES, family_of
from mrl.reshard.layout import Coord, ExpertCoord, Layout, expert_range
from mrl.reshard.network import Network
from mrl.reshard.params import (
    GatherGroup, ParamPlan, chunk_prefix, duplicates, gather_groups, hf_tensors, is_expert, is_output,
    local_params,
)
from mrl.reshard.pieces import Piece
from mrl.reshard.plan import SyncOptions, SyncPlan, plan_sync
from mrl.reshard.rules import Family, MoeKeys, Rule
from mrl.reshard.spec import MlaSpec, ModelSpec, MoeSpec, layout_problems, model_spec, read_config
from mrl.reshard.views import assemble_views, direct_views, pack_views

_WITH_TORCH = {"load_hf": "load", "export_tensors": "export", "save_hf": "export"}

__all__ = [
    "Bucket", "Contribution", "Coord", "DTYPE_BYTES", "EngineLayout", "ExpertCoord", "FAMILIES", "Family",
    "GatherGroup", "Layout", "MlaSpec", "ModelSpec", "MoeKeys", "MoeSpec", "Network", "Outline", "ParamPlan", "Part",
    "Piece", "Rule", "Slice", "SliceOutline", "SyncOptions", "SyncPlan", "assemble_views", "chunk_prefix",
    "direct_views", "duplicates", "expert_range", "family_of", "gather_groups", "held_boxes", "hf_tensors",
    "is_expert", "is_output", "layout_problems", "local_params", "model_spec", "pack_views", "plan_sync",
    "read_config", *_WITH_TORCH,
]


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
