"""The wire form of one engine's share of a plan: plain JSON types. `mrl_receiver/wire.py` describes and reads it."""
from __future__ import annotations

from typing import Any, Iterable, Mapping, Sequence

from mrl.reshard.buckets import Bucket, Part


def to_wire(buckets: Iterable[Bucket], senders: Sequence[int], workers: int, node: int) -> dict[str, Any]:
    """`buckets` of an engine of so many workers, with the senders named by their position among `senders`."""
    positions = {rank: position for position, rank in enumerate(senders)}
    shapes: dict[str, list[int]] = {}
    written = [_bucket(bucket, positions, shapes) for bucket in buckets]
    return {"workers": workers, "node": node, "senders": len(senders), "tensors": shapes, "buckets": written}


def _bucket(bucket: Bucket, positions: Mapping[int, int], shapes: dict[str, list[int]]) -> dict[str, Any]:
    for one in bucket.slices:
        shapes.update((part.name, list(part.shape)) for part in one.parts)
    return {
        "index": bucket.index, "dtype": bucket.dtype, "mode": bucket.mode, "worker": bucket.worker,
        "slice_numel": bucket.slice_numel,
        "slices": [{"sender": positions.get(one.sender, 0), "numel": one.numel, "parts": [_part(p) for p in one.parts]}
                   for one in bucket.slices],
    }


def _part(part: Part) -> list:
    return [part.name, None if part.whole else [list(span) for span in part.box], part.offset]
