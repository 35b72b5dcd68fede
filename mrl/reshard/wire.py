"""The wire form of one engine's share of a plan: plain JSON types. `mrl_receiver/wire.py` describes and reads it.

Groups of a kind give the same boxes of other tensors, and so do not repeat them: what lies in a slice is written once
for all of them, by the places of tensors in their group.
"""
from __future__ import annotations

from itertools import accumulate
from typing import Any

from mrl.reshard.boxes import Box, numel, whole
from mrl.reshard.fp8 import SCALES, VALUES, blocks, places, scales_name, scales_shape
from mrl.reshard.loads import Items, Load
from mrl.reshard.params import GatherGroup
from mrl.reshard.pieces import Shape
from mrl.reshard.schedule import Schedule


def to_wire(schedule: Schedule, engine: int) -> dict[str, Any]:
    """What the workers of an engine need to know, with the senders named by their position among the engine's."""
    writer = _Writer()
    lane = engine % schedule.lanes
    senders = schedule.senders(lane)
    positions = {rank: position for position, rank in enumerate(senders)}
    buckets = []
    for index in schedule.of_lane(lane):
        step, _ = schedule.at(index)
        slices = []
        for load, origin in zip(step.loads, schedule.origins(step, lane)):
            group = schedule.groups[load.group]
            slices.append({"sender": positions.get(origin.sender, 0), "numel": load.sent,
                           "group": writer.group(load.group, group), "contents": writer.contents(load, group)})
        buckets.append({
            "index": index, "dtype": schedule.dtype_of(step), "mode": schedule.mode(step), "worker": step.worker,
            "slice_numel": max(load.sent for load in step.loads), "slices": slices})
    return {"workers": schedule.engines.world, "node": schedule.engines.node, "senders": len(senders),
            "tensors": writer.tensors, "groups": writer.groups, "contents": writer.written, "buckets": buckets}


class _Writer:
    """The tensors, groups and contents written so far."""

    def __init__(self) -> None:
        self.tensors: dict[str, list[int]] = {}
        self.groups: list[list[int]] = []
        self.written: list[list[list]] = []
        self._numbers: dict[str, int] = {}
        self._groups: dict[int, int] = {}
        self._contents: dict[int, tuple[int, Items]] = {}

    def group(self, number: int, group: GatherGroup) -> int:
        """The number of a group on the wire; `number` is that in the plan."""
        if number not in self._groups:
            self._groups[number] = len(self.groups)
            tensors = [(tensor.name, tensor.shape) for parameter in range(len(group.entries))
                       for tensor in group.tensors(parameter)]
            if group.fp8:
                tensors += [(scales_name(name), scales_shape(shape)) for name, shape in tensors]
            for name, shape in tensors:
                self._numbers.setdefault(name, len(self._numbers))
                self.tensors[name] = list(shape)
            self.groups.append([self._numbers[name] for name, _ in tensors])
        return self._groups[number]

    def contents(self, load: Load, group: GatherGroup) -> int:
        """The number of what lies in a slice."""
        key = id(load.items)
        if key not in self._contents:
            self._contents[key] = len(self.written), load.items  # kept, so that no other gets its id
            self.written.append(_parts(load, group))
        return self._contents[key][0]


def _parts(load: Load, group: GatherGroup) -> list[list]:
    first, numbers = 0, []
    for entry in group.entries:
        numbers.append(first)
        first += len(entry.rule.hf)
    boxes = [(numbers[parameter] + tensor, group.tensors(parameter)[tensor].shape, box)
             for parameter, tensor, box in load.items]
    if not group.fp8:
        offsets = accumulate((numel(box) for *_, box in boxes), initial=0)
        return [_part(*box, offset) for box, offset in zip(boxes, offsets)]
    at = places([box for *_, box in boxes])
    values = [_part(*box, offset, VALUES) for box, offset in zip(boxes, at.values)]
    scales = [_part(first + number, scales_shape(shape), blocks(box), offset, SCALES)
              for (number, shape, box), offset in zip(boxes, at.scales)]
    return values + scales


def _part(number: int, shape: Shape, box: Box, offset: int, *dtype: str) -> list:
    """`number`: place of the tensor in its group, where the scales of a quantised group's tensors follow these."""
    return [number, None if box == whole(shape) else [list(span) for span in box], offset, *dtype]
