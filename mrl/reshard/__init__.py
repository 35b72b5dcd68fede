"""Rules, family tables, layouts and plans: Hugging Face tensors to Megatron shards and back.

Pure functions; nothing here knows torch.distributed. Importing this package does not import torch: what reads and
writes checkpoint directories is in `mrl.reshard.load` and `mrl.reshard.export`.
"""
from mrl.reshard.families import FAMILIES, family_of
from mrl.reshard.layout import Coord, Layout, layer_range
from mrl.reshard.params import ParamPlan, hf_tensors, local_params
from mrl.reshard.pieces import Piece
from mrl.reshard.plan import DTYPE_BYTES, Bucket, BucketItem, SyncPlan, plan_sync
from mrl.reshard.rules import Family, Rule
from mrl.reshard.spec import ModelSpec, layout_problems, model_spec, read_config
from mrl.reshard.views import assemble_views, pack_views

__all__ = [
    "Bucket", "BucketItem", "Coord", "DTYPE_BYTES", "FAMILIES", "Family", "Layout", "ModelSpec", "ParamPlan", "Piece",
    "Rule", "SyncPlan", "assemble_views", "family_of", "hf_tensors", "layer_range", "layout_problems", "local_params",
    "model_spec", "pack_views", "plan_sync", "read_config",
]
