"""Filling flat Hugging Face buckets from the shards of one pipeline stage.

Every tensor-parallel rank packs its shards of a bucket into one flat buffer; one gather brings the buffers to the
stage's sender, which assembles them into the bucket. Each of these is one call per bucket, over views made once.
"""
from __future__ import annotations

from typing import Mapping, Optional

import torch
import torch.distributed as dist

from mrl.receiver.mrl_receiver.links import finish_stream
from mrl.reshard.plan import Bucket
from mrl.reshard.views import Views, assemble_views, pack_views


class StageBuckets:
    """The buckets of one stage, in the memory of one of its tensor-parallel ranks.

    params: this rank's shards by Megatron name, updated in place by training. group: the stage's tensor-parallel
    ranks, None when there is only one. sender: whether this rank, the first of `group`, holds the finished buckets.
    buffers: finished buckets that the sender holds at a time; bucket i lies in buffer i mod `buffers`.
    ValueError for buckets that other ranks than the tensor-parallel ones hold: experts under their own parallel sizes.
    """

    def __init__(self, buckets: list[Bucket], params: Mapping[str, torch.Tensor], group: Optional[dist.ProcessGroup],
                 sender: bool, buffers: int):
        self.buckets, self.params, self.group, self.sender = buckets, params, group, sender
        device = next(iter(params.values())).device
        dtype = getattr(torch, buckets[0].dtype)
        ranks = len(buckets[0].shards)
        if foreign := {len(bucket.shards) for bucket in buckets} - {ranks}:
            raise ValueError(f"buckets of stage {buckets[0].stage} are gathered from {ranks} ranks, experts' from "
                             f"{foreign.pop()}: a stage's buckets must all come from its tensor-parallel ranks; "
                             "use a layout where ep * etp is tp")

        def flats(count: int, numel: int) -> list[torch.Tensor]:
            return [torch.empty(numel, dtype=dtype, device=device) for _ in range(count)]

        local = max(bucket.local_numel for bucket in buckets)
        self.packed = flats(1, local)[0] if group is not None else None
        self.gathered = flats(ranks, local) if group is not None and sender else []
        self.ring = flats(buffers, max(bucket.numel for bucket in buckets)) if sender else []
        self.pointers = _pointers(params)
        self.pack_views: list[Views] = []
        self.assemble_views: list[Views] = []
        for position, bucket in enumerate(buckets):
            if group is not None:
                self.pack_views.append(pack_views(bucket, params, self.packed))
            if sender:
                flat = self.ring[position % buffers]
                self.assemble_views.append(assemble_views(bucket, self.gathered, flat) if group is not None
                                           else _direct_views(bucket, params, flat))

    def current(self, params: Mapping[str, torch.Tensor]) -> bool:
        """Whether the views still point at the memory of `params`."""
        return self.pointers == _pointers(params)

    def flat(self, position: int) -> torch.Tensor:
        """The finished bucket at `position`, on the sender."""
        return self.ring[position % len(self.ring)][:self.buckets[position].numel]

    @torch.no_grad()
    def fill(self, position: int) -> None:
        """Gather and assemble one bucket: collective over the group. The sender's buffer must be free."""
        if self.group is not None:
            sources, targets = self.pack_views[position]
            torch._foreach_copy_(targets, sources)
            numel = self.buckets[position].local_numel
            parts = [flat[:numel] for flat in self.gathered] if self.sender else None
            dist.gather(self.packed[:numel], parts, group=self.group, group_dst=0)
        if self.sender:
            sources, targets = self.assemble_views[position]
            torch._foreach_copy_(targets, sources)
            finish_stream(self.ring[0].device)  # another thread sends it


def _direct_views(bucket: Bucket, params: Mapping[str, torch.Tensor], flat: torch.Tensor) -> Views:
    """Straight from the shards of a stage's only rank into the flat bucket."""
    places = {item.name: flat[item.offset:item.offset + item.numel].view(item.shape) for item in bucket.items}
    sources, targets = [], []
    for param in bucket.shards[0]:
        for piece in param.pieces:
            if piece.leaves:
                sources.append(piece.of_local(params[param.name]))
                targets.append(piece.of_hf(places[piece.hf]))
    return sources, targets


def _pointers(params: Mapping[str, torch.Tensor]) -> list[tuple[str, int]]:
    return [(name, tensor.data_ptr()) for name, tensor in params.items()]
