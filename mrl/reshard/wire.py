"""The wire form of one engine's share of a plan: plain JSON types. `mrl_receiver/wire.py` describes and reads it.

Groups of a kind give the same boxes of other tensors, and so do not repeat them: what lies in a slice is written once
for all of them, by the places of tensors in their group.
"""
from __future__ import annotations

from typing import Any

from mrl.reshard.boxes import numel, whole
from mrl.reshard.loads import Items, Load
from mrl.reshard.params import GatherGroup
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
            slices.append({"sender": positions.get(origin.sender, 0), "numel": load.numel,
                           "group": writer.group(load.group, group), "contents": writer.contents(load, group)})
        buckets.append({
            "index": index, "dtype": schedule.dtype_of(step), "mode": schedule.mode(step), "worker": step.worker,
            "slice_numel": max(load.numel for load in step.loads), "slices": slices})
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
            names = []
            for parameter in range(len(group.entries)):
                for tensor in group.tensors(parameter):
                    self._numbers.setdefault(tensor.name, len(self._numbers))
                    self.tensors[tensor.name] = list(tensor.shape)
                    names.append(self._numbers[tensor.name])
            self.groups.append(names)
        return self._groups[number]

    def contents(self, load: Load, group: GatherGroup) -> int:
        """The number of what lies in a slice."""
        key = id(load.items)
        if key not in self._contents:
            self._contents[key] = len(self.written), load.items  # kept, so that no other gets its id
            self.written.append(_parts(load, group))
        return self._contents[key][0]


def _parts(load: Load, group: GatherGroup) -> list[list]:
    first, places = 0, []
    for entry in group.entries:
        places.append(first)
        first += len(entry.rule.hf)
    parts, offset = [], 0
    for parameter, tensor, box in load.items:
        shape = group.tensors(parameter)[tensor].shape
        sides = None if box == whole(shape) else [list(span) for span in box]
        parts.append([places[parameter] + tensor, sides, offset])
        offset += numel(box)
    return parts
