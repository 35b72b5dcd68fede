"""From where a tensor lives to what is copied when a bucket arrives, worked out once for each place of arrival.

A bucket brings boxes of HF tensors; the trace says which elements of a tensor live where. Their intersection is a few
rectangles, so the copies (`copies.py`) are between views of the buffer and of the parameters. What cannot be copied box
by box is collected in staging memory until its tensors are whole.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, Iterable, Iterator, NamedTuple, Optional, Sequence

import torch

from .copies import Copies, unattached
from .trace import Home, Loader, Traced
from .wire import Bucket, Lattice, Part, Plan, overlap, row_major


class Block(NamedTuple):
    """Elements that a home and a part share: `home[index]`, and where they lie, from the part's first element on."""

    index: tuple[slice, ...]
    shape: tuple[int, ...]
    start: int
    strides: tuple[int, ...]


class _Axis(NamedTuple):
    """A dimension of a lattice that steps along a dimension of the HF tensor."""

    dimension: int
    size: int
    step: int


def intersect(lattice: Lattice, part: Part, steps: Optional[Sequence[int]] = None) -> Optional[list[Block]]:
    """The elements of `lattice` that lie in the part's box, as rectangles. None: they cannot be told apart that way.

    steps: strides of the part's elements, by dimension of its box; None: they lie row by row without gaps. Lattices
    that cannot be told apart have rows that run across the rows of the HF tensor; of a whole one without gaps they can.
    """
    start, shape, strides = lattice
    if part.whole and steps is None:
        return [Block(tuple(slice(0, size) for size in shape), shape, start, strides)]
    separated = _separate(lattice, part.shape)
    if separated is None:
        return None
    corner, axes = separated
    inside = [_inside(axes[d], corner[d], *part.box[d]) for d in range(len(part.shape))]
    steps = steps or row_major(part.box_shape)
    blocks = []
    for ranges in product(*inside):
        first = sum((corner[d] - part.box[d][0]) * steps[d] for d in range(len(steps)))
        index, block_strides = [slice(0, 1)] * len(shape), [0] * len(shape)
        for d, chosen in enumerate(ranges):
            for axis, (low, high) in zip(axes[d], chosen):
                index[axis.dimension] = slice(low, high)
                block_strides[axis.dimension] = axis.step * steps[d]
                first += low * axis.step * steps[d]
        blocks.append(Block(tuple(index), tuple(one.stop - one.start for one in index), first, tuple(block_strides)))
    return blocks


def _separate(lattice: Lattice, shape: tuple[int, ...]) -> Optional[tuple[list[int], list[list[_Axis]]]]:
    """The coordinates of a lattice's first element, and for every dimension of the tensor the lattice's axes along it,
    coarsest first. None when an axis runs along no single dimension."""
    start, sizes, strides = lattice
    steps = row_major(shape)
    corner = [start // step % size for step, size in zip(steps, shape)]
    axes: list[list[_Axis]] = [[] for _ in shape]
    for dimension, (size, stride) in enumerate(zip(sizes, strides)):
        if size == 1:
            continue
        along = next((d for d, step in enumerate(steps) if shape[d] > 1 and step <= stride), None)
        if along is None or stride % steps[along]:
            return None
        axes[along].append(_Axis(dimension, size, stride // steps[along]))
    for d, found in enumerate(axes):
        found.sort(key=lambda axis: -axis.step)
        spans = [(axis.size - 1) * axis.step for axis in found]
        if corner[d] + sum(spans) >= shape[d]:
            return None
        if any(axis.step <= sum(spans[position + 1:]) for position, axis in enumerate(found)):
            return None
    return corner, axes


def _inside(axes: Sequence[_Axis], corner: int, low: int, high: int) -> list[tuple[tuple[int, int], ...]]:
    """The ranges of `axes`, one tuple a rectangle, whose coordinates corner + Σ step·k lie in low … high - 1."""
    if not axes:
        return [()] if low <= corner < high else []
    (_, size, step), *finer = axes
    span = sum((axis.size - 1) * axis.step for axis in finer)

    def within(first: int, last: int) -> tuple[int, int]:
        """Range of k with first <= corner + step·k <= last."""
        return max(0, -((corner - first) // step)), min(size, (last - corner) // step + 1)

    touched, full = within(low - span, high - 1), within(low, high - 1 - span)
    if full[0] >= full[1]:
        full = (touched[1], touched[1])
    found = [(full, *((0, axis.size) for axis in finer))] if full[0] < full[1] else []
    for k in [*range(touched[0], full[0]), *range(full[1], touched[1])]:
        found += [((k, k + 1), *rest) for rest in _inside(finer, corner + step * k, low, high)]
    return found


@dataclass
class Route:
    """How one bucket reaches the parameters, wherever it has arrived.

    fills: what is filled first. finished: groups of tensors that are whole in staging memory when this bucket has been
    put there.
    """

    bucket: Bucket
    fills: list[tuple[Any, tuple]] = field(default_factory=list)
    finished: list[tuple[str, ...]] = field(default_factory=list)


class Arrival(NamedTuple):
    """A bucket in one place where it arrives: the copies into parameters, and the parts, with their views, that go to
    staging memory."""

    copies: Copies
    staged: list[tuple[Part, torch.Tensor]]

    @property
    def sources(self) -> list[torch.Tensor]:
        """Views of where it arrives: all that is read."""
        return [*self.copies.sources, *(view for _, view in self.staged)]


class Routes:
    """The routes of all buckets of one worker, and the staging memory that they share.

    in_parts: tensors may arrive in other parts than those of the buckets.
    """

    def __init__(self, buckets: Sequence[Bucket], traced: Traced, load: Loader, in_parts: bool = False):
        self.traced, self.load = traced, load
        self.staging: dict[str, torch.Tensor] = {}
        self.staged = staged_names(buckets, traced, in_parts)
        self.routes = [Route(bucket) for bucket in buckets]
        filled: set[str] = set()
        last: dict[tuple[str, ...], Route] = {}
        for route in self.routes:
            for name in dict.fromkeys(part.name for part, _ in route.bucket.parts):
                if name not in filled:
                    route.fills += traced.fills.get(name, [])
                    filled.add(name)
                if name in self.staged:
                    last[tuple(sorted(traced.together.get(name, {name})))] = route
        for group, route in last.items():
            route.finished.append(group)

    def arrival(self, position: int, flat: torch.Tensor) -> Arrival:
        """What is to be done with the bucket at `position` when it has arrived in `flat`, of its dtype."""
        return self.arrival_of((part, part.values(flat, offset)) for part, offset in self.routes[position].bucket.parts)

    def arrival_of(self, parts: Iterable[tuple[Part, torch.Tensor]]) -> Arrival:
        """What is to be done with parts that have arrived, each in a tensor of its box's shape."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        staged: list[tuple[Part, torch.Tensor]] = []
        for part, values in parts:
            if part.name in self.staged:
                staged.append((part, unattached(values)))
            else:
                pairs += placed(part, values, self.traced)
        return Arrival(Copies(pairs), staged)

    @torch.no_grad()
    def apply(self, position: int, arrival: Arrival, fill: bool = True) -> None:
        """Put the bucket at `position` into the parameters, or into staging memory.

        fill: write the constants that come with it, too. They are there already after a whole sync.
        """
        route = self.routes[position]
        for operation, arguments in route.fills if fill else ():
            operation(*arguments)
        arrival.copies.run()
        for part, view in arrival.staged:
            if part.name not in self.staging:
                self.staging[part.name] = torch.empty(part.shape, dtype=view.dtype, device=view.device)
            self.staging[part.name][tuple(slice(*span) for span in part.box)].copy_(view)
        for group in route.finished:
            self._unstage({name: self.staging.pop(name) for name in group})

    def _unstage(self, tensors: dict[str, torch.Tensor]) -> None:
        """Whole tensors into the parameters: those that are opaque through the loader, which may keep them."""
        if tensors.keys() & self.traced.opaque.keys():
            self.load(iter(tensors.items()))
            return
        for name, tensor in tensors.items():
            for (start, shape, strides), target in self.traced.homes[name]:
                target.copy_(tensor.as_strided(shape, strides, start))


def staged_names(buckets: Sequence[Bucket], traced: Traced, in_parts: bool = False) -> set[str]:
    """Names of the tensors that cannot be copied as they come: in the buckets' parts, or in any parts of those."""
    staged = {part.name for bucket in buckets for part, _ in bucket.parts if part.name in traced.opaque}
    for bucket in buckets:
        for part, _ in bucket.parts:
            steps = row_major(part.box_shape) if in_parts else None
            if any(intersect(home.lattice, part, steps) is None for home in traced.homes.get(part.name, [])):
                staged.add(part.name)
    return staged


def placed(part: Part, values: torch.Tensor, traced: Traced) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views of a part's elements that a worker holds, in `values`, of its box's shape, and of where it holds them.

    Of tensors that are not staged alone.
    """
    steps = None if values.is_contiguous() else values.stride()
    for home in traced.homes.get(part.name, []):
        for block in intersect(home.lattice, part, steps):
            yield (_bytes(values.as_strided(block.shape, block.strides, values.storage_offset() + block.start)),
                   _bytes(home.target[block.index]))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """What has one byte an element, as integers: not every kernel that copies many tensors at once knows fp8."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def misfits(plan: Plan, worker: int, traced: Traced) -> dict[str, str]:
    """The tensors whose shards for this worker are not exactly what it holds of them, and why."""
    parts: dict[str, list[Part]] = {name: [] for name in plan.direct}
    for bucket in plan.of_worker(worker):
        if bucket.mode == "direct":
            for part, _ in bucket.parts:
                parts[part.name].append(part)
    found = {name: _misfit(given, traced.homes.get(name, []), traced.opaque.get(name))
             for name, given in parts.items()}
    return {name: f"worker {worker}: {why}" for name, why in found.items() if why}


def _misfit(parts: list[Part], homes: list[Home], opaque: Optional[str]) -> Optional[str]:
    if opaque:
        return opaque
    if any(overlap(one.box, other.box) for position, one in enumerate(parts) for other in parts[:position]):
        return "it is sent some elements twice"
    held = {home.lattice for home in homes}
    for lattice in held:
        blocks = [intersect(lattice, part) for part in parts]
        if None in blocks:
            return "what it holds runs across the rows of the tensor"
        covered = sum(prod(block.shape) for found in blocks for block in found)
        if covered != prod(lattice[1]):
            return f"it holds a block of {prod(lattice[1])} elements and is sent {covered} of them"
    sent, wanted = sum(part.numel for part in parts), sum(prod(lattice[1]) for lattice in held)
    return None if sent == wanted else f"it is sent {sent} elements and holds {wanted}"
