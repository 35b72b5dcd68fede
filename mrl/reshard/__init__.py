"""Rules, family tables, layouts and plans: Hugging Face tensors to Megatron shards and back.

Pure functions; nothing here knows torch.distributed. Importing this package does not import torch: `load_hf`,
`export_tensors` and `save_hf`, which read and write checkpoint directories, do so when they are first asked for.
"""
from importlib import import_module
from typing import Any

from mrl.reshard.families import FAMILIES, family_of
from mrl.reshard.layout import Coord, ExpertCoord, Layout, expert_range
from mrl.reshard.params import ParamPlan, chunk_prefix, hf_tensors, is_expert, local_params
from mrl.reshard.pieces import Piece
from mrl.reshard.plan import DTYPE_BYTES, Bucket, BucketItem, SyncPlan, plan_sync
from mrl.reshard.rules import Family, MoeKeys, Rule
from mrl.reshard.spec import ModelSpec, MoeSpec, layout_problems, model_spec, read_config
from mrl.reshard.views import assemble_views, pack_views

_WITH_TORCH = {"load_hf": "load", "export_tensors": "export", "save_hf": "export"}

__all__ = [
    "Bucket", "BucketItem", "Coord", "DTYPE_BYTES", "ExpertCoord", "FAMILIES", "Family", "Layout", "ModelSpec",
    "MoeKeys", "MoeSpec", "ParamPlan", "Piece", "Rule", "SyncPlan", "assemble_views", "chunk_prefix",
    "expert_range", "family_of", "hf_tensors", "is_expert", "layout_problems", "local_params", "model_spec",
    "pack_views", "plan_sync", "read_config", *_WITH_TORCH,
]


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
