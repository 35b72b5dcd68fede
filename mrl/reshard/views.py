"""A bucket as copies between tensors: pairs of views made once, then handed to `torch._foreach_copy_` every sync.

The stream code packs, gathers, assembles and sends without knowing any layout:

    every rank      srcs, dsts = pack_views(bucket, params, flat)             shards          -> one flat buffer
    gather          flat buffers of the bucket's ranks                        -> the stage's sender
    the sender      srcs, dsts = assemble_views(bucket, gathered, hf_flat)    gathered shards -> flat HF bucket

The views keep pointing at the same memory, so they stay valid as long as parameters and buffers are updated in place.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Mapping, Sequence

from mrl.reshard.plan import Bucket

if TYPE_CHECKING:
    from torch import Tensor

Views = tuple[list["Tensor"], list["Tensor"]]
"""(sources, destinations), pairwise of equal shapes."""


def pack_views(bucket: Bucket, params: Mapping[str, Tensor], flat: Tensor) -> Views:
    """From this rank's parameters, one behind the other, into `flat` (1-D, at least `bucket.local_numel` elements).

    `params` maps Megatron names to local shards. ValueError for a shard whose shape is not the planned one, or that is
    of another dtype than `flat` (a router kept in float32, say): what leaves is what trains, bit for bit.
    """
    srcs, dsts, offset = [], [], 0
    for param in bucket.shards[0]:
        shard = params[param.name]
        if tuple(shard.shape) != param.shape:
            raise ValueError(f"{param.name} has shape {tuple(shard.shape)}, the plan says {param.shape}")
        if shard.dtype != flat.dtype:
            raise ValueError(f"{param.name} is {shard.dtype}, its bucket {flat.dtype}")
        srcs.append(shard)
        dsts.append(flat[offset:offset + param.numel].view(param.shape))
        offset += param.numel
    return srcs, dsts


def assemble_views(bucket: Bucket, gathered: Sequence[Tensor], hf_flat: Tensor) -> Views:
    """From the packed buffers (`gathered[m]` as filled by the rank of `bucket.shards[m]`) into the flat HF bucket.

    The destinations cover elements 0 … `bucket.numel` exactly once.
    """
    targets = {item.name: hf_flat[item.offset:item.offset + item.numel].view(item.shape) for item in bucket.items}
    srcs, dsts = [], []
    for flat, params in zip(gathered, bucket.shards, strict=True):
        offset = 0
        for param in params:
            shard = flat[offset:offset + param.numel].view(param.shape)
            offset += param.numel
            for piece in param.pieces:
                if piece.leaves:
                    srcs.append(piece.of_local(shard))
                    dsts.append(piece.of_hf(targets[piece.hf]))
    return srcs, dsts
