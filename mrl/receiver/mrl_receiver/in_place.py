"""Weights that need not be gathered for their receiver: it reads them where the sender's parameters have them.

For transports within one memory. What lies where is described once, relative to the storages, which each sync brings
anew: a trainer may give its memory up between two of them, and nobody may hold it then.
"""
from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Iterable, Sequence

import torch

from .wire import Bucket, Part


@dataclass(frozen=True)
class InPlace:
    """Parts of a bucket as they lie in their sender's memory: `values`, in the shapes of their boxes, of one dtype."""

    parts: Sequence[Part]
    values: Sequence[torch.Tensor]

    @cached_property
    def nbytes(self) -> int:
        return sum(values.nbytes for values in self.values)

    @cached_property
    def storages(self) -> tuple[torch.UntypedStorage, ...]:
        """Each once. They follow the memory."""
        found = {storage._cdata: storage for storage in map(torch.Tensor.untyped_storage, self.values)}
        return tuple(found.values())

    @cached_property
    def description(self) -> bytes:
        """JSON: of every part [HF name, box, position of its storage, first element there, strides]."""
        positions = {storage._cdata: position for position, storage in enumerate(self.storages)}
        return json.dumps([[part.name, part.box, positions[values.untyped_storage()._cdata], values.storage_offset(),
                            values.stride()] for part, values in zip(self.parts, self.values, strict=True)]).encode()


def read(description: bytes, bucket: Bucket, storages: Sequence[torch.UntypedStorage]
         ) -> list[tuple[Part, torch.Tensor]]:
    """The parts that a description tells of, with their values. ValueError unless they are all that the bucket has."""
    shapes = {part.name: part.shape for part, _ in bucket.parts}
    found: list[tuple[Part, torch.Tensor]] = []
    for name, box, position, first, strides in json.loads(description):
        if name not in shapes:
            raise ValueError(f"{name} is not in bucket {bucket.index}")
        part = Part(name, shapes[name], tuple((start, stop) for start, stop in box), 0)
        found.append((part, torch.empty(0, dtype=bucket.torch_dtype, device=storages[position].device).set_(
            storages[position], first, part.box_shape, strides)))
    if _elements(part for part, _ in found) != _elements(part for part, _ in bucket.parts):
        raise ValueError(f"what lies in place is not all of bucket {bucket.index}")
    return found


def _elements(parts: Iterable[Part]) -> Counter[str]:
    """By HF name."""
    counted: Counter[str] = Counter()
    for part in parts:
        counted[part.name] += part.numel
    return counted


class MovingViews:
    """Views of storages that are there during a sync, and elsewhere in the next: the same tensors, with other memory.

    views: of no other tensor, as far as torch knows (`copies.unattached`). In between they have no memory.
    """

    def __init__(self, views: Iterable[torch.Tensor], storages: Sequence[torch.UntypedStorage]):
        positions = {storage._cdata: position for position, storage in enumerate(storages)}
        self.storages = list(storages)
        self.places = [(view, positions[view.untyped_storage()._cdata], view.storage_offset(), view.shape,
                        view.stride()) for view in views]

    @torch.no_grad()
    def follow(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Be views of these storages, unless they are already."""
        if self.storages != list(storages):
            self.storages = list(storages)
            for view, position, first, shape, strides in self.places:
                view.set_(storages[position], first, shape, strides)

    @torch.no_grad()
    def leave(self) -> None:
        """Hold no memory."""
        self.storages = []
        for view, *_ in self.places:
            view.set_()
