"""The weights that a worker holds, as the slices they came in: what changes are applied to.

They are read back from the parameters by the views that a sync writes through, so they take no memory. What cannot be
read back exactly is kept beside: tensors that the loader transforms or that arrive in pieces, those that the engine
holds in another dtype (a wider one would give back all numbers, but not the bits of every NaN), and those that share
elements of a parameter with others. Elements that this worker does not hold have no base, and need none.
"""
from __future__ import annotations

from typing import Sequence

import torch

from .delta import WHOLE, Header, unpack
from .routes import placed, staged_names
from .trace import Traced
from .wire import Bucket


class Base:
    """For the buckets of one worker, each of which arrives in its slot.

    places: by bucket, its slices in its slot. sources: by bucket and slice, (view of the slot, where it is held). kept:
    by bucket, (view of the slot, what is kept of it) of every part that cannot be read back.
    """

    def __init__(self, buckets: Sequence[Bucket], slots: Sequence[torch.Tensor], traced: Traced):
        self.places = [[flat[position * bucket.slice_numel:][:one.numel] for position, one in enumerate(bucket.slices)]
                       for bucket, flat in zip(buckets, slots)]
        self.kept: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        self.sources: list[list[list[tuple[torch.Tensor, torch.Tensor]]]] = []
        unreadable = staged_names(buckets, traced) | shared_names(traced)
        for bucket, flat in zip(buckets, slots):
            self.kept.append([])
            self.sources.append([[] for _ in bucket.slices])
            for position, one in enumerate(bucket.slices):
                for part in one.parts:
                    offset = position * bucket.slice_numel + part.offset
                    homes = traced.homes.get(part.name, [])
                    view = part.values(flat, offset)
                    if part.name in unreadable or any(home.target.dtype != view.dtype for home in homes):
                        self.kept[-1].append((view, torch.empty_like(view)))
                        self.sources[-1][position].append(self.kept[-1][-1])
                    else:
                        self.sources[-1][position] += placed(part, view, traced)

    @property
    def nbytes(self) -> int:
        """Memory of what is kept."""
        return sum(copy.nbytes for bucket in self.kept for _, copy in bucket)

    @torch.no_grad()
    def complete(self, position: int, headers: Sequence[Header]) -> None:
        """Make the messages in the slot of the bucket at `position`, one a slice, what a full sync would have brought.

        Needs memory for the deltas of one bucket. ValueError when one is broken.
        """
        for flat, header, sources in zip(self.places[position], headers, self.sources[position], strict=True):
            if header.kind != WHOLE:
                payload = flat.view(torch.uint8)[:header.nbytes].clone()
                _copy(sources)
                unpack(header, payload, flat)
        _copy([(copy, view) for view, copy in self.kept[position]])


def shared_names(traced: Traced) -> set[str]:
    """Tensors whose places in the model's memory may overlap with others', or among themselves.

    Takes one byte an element of the largest storage, while it runs.
    """
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, homes in traced.homes.items():
        for home in homes:
            by_storage.setdefault(home.target.untyped_storage().data_ptr(), []).append((name, home.target))
    return {name for found in by_storage.values() if not _disjoint([target for _, target in found])
            for name, _ in found}


def _disjoint(views: Sequence[torch.Tensor]) -> bool:
    """Whether no two elements of these views of one storage are the same memory; False if their dtypes differ."""
    first = views[0]
    if any(view.dtype != first.dtype for view in views):
        return False
    marks = torch.zeros(first.untyped_storage().nbytes() // first.itemsize, dtype=torch.bool, device=first.device)
    for view in views:
        marks.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
    return int(marks.count_nonzero()) == sum(view.numel() for view in views)


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Every second into its first."""
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
