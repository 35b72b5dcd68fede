"""A load spelled out: the parts of its slice, and the pieces that every rank of its gather group gives."""
from __future__ import annotations

from itertools import groupby

from mrl.reshard.boxes import numel
from mrl.reshard.loads import Load
from mrl.reshard.params import GatherGroup
from mrl.reshard.buckets import Contribution, Part


def parts_of(load: Load, group: GatherGroup) -> tuple[Part, ...]:
    """The parts of a load in the order of its items, one behind the other."""
    parts, offset = [], 0
    for parameter, items in groupby(load.items, key=lambda item: item[0]):
        tensors = group.tensors(parameter)
        for _, tensor, box in items:
            parts.append(Part(tensors[tensor].name, tensors[tensor].shape, box, offset))
            offset += numel(box)
    return tuple(parts)


def shards_of(
    load: Load, group: GatherGroup, te: bool, rank: int | None = None,
) -> tuple[tuple[Contribution, ...], ...]:
    """What every rank of the group gives to a load, or only rank number `rank` does."""
    shards: list[list[Contribution]] = [[] for _ in range(group.size if rank is None else 1)]
    for parameter, items in groupby(load.items, key=lambda item: item[0]):
        names = [tensor.name for tensor in group.tensors(parameter)]
        boxes = [(names[tensor], box) for _, tensor, box in items]
        column = group.column(parameter, te)
        for shard, param in zip(shards, column if rank is None else column[rank:rank + 1], strict=True):
            pieces = tuple(clipped for name, box in boxes for piece in param.pieces
                           if piece.leaves and piece.hf == name for clipped in piece.clipped(box))
            if pieces:
                shard.append(Contribution(param.name, param.shape, pieces))
    return tuple(map(tuple, shards))
