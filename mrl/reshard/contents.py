"""What leaves from each gather group, as boxes of its tensors: all of it, or what one rank has for one worker."""
from __future__ import annotations

from typing import Callable, Iterator, Sequence, TypeVar

from mrl.reshard.boxes import Box, hull, intersection, numel
from mrl.reshard.engine_layout import EngineLayout, expert_block, held_boxes, shardable
from mrl.reshard.fp8 import BLOCK, of_whole_blocks, places, quantised_name
from mrl.reshard.loads import Items, deal, fill, size
from mrl.reshard.params import GatherGroup

T = TypeVar("T")

Given = tuple[tuple[tuple[Box, ...], ...], ...]
"""Boxes that leave, by number of the tensor in its rule and by rank of the group."""

Sized = tuple[Items, int, int]
"""Boxes, their elements together, and the elements that are sent: bytes, where they go in fp8."""


class Contents:
    """Boxes that leave from `groups`, which are named by their number. Groups that hold parameters of the same shapes,
    like those of other experts or layers, have the same boxes, computed once.

    te: see `local_params`. not_sharded: HF tensors that go in slices whatever the engine holds.
    """

    def __init__(self, groups: Sequence[GatherGroup], te: bool, engines: EngineLayout, not_sharded: frozenset[str]):
        self.groups, self.te, self.engines = groups, te, engines
        self.not_sharded = frozenset(map(quantised_name, not_sharded))
        self.spec = groups[0].spec
        self.computed: dict[tuple, object] = {}
        classes: dict[tuple, int] = {}
        self.classes = [[classes.setdefault(self._class(group, number), len(classes))
                         for number in range(len(group.entries))] for group in groups]
        """By group and parameter, a number that is the same for parameters with the same boxes."""
        kinds: dict[tuple, int] = {}
        self.kind = [kinds.setdefault((*numbers,), at)
                     for at, (group, numbers) in enumerate(zip(groups, self.classes))]
        """By group, the first group of the same kind."""

    def everything(self, group: int, sharded: bool) -> Items:
        """All that leaves from a group; with `sharded`, less what goes from shard to shard."""
        return self._once(("everything", self.kind[group], sharded), lambda: tuple(
            (parameter, tensor, self._whole(self.kind[group], parameter, tensor))
            for parameter, tensor in self._tensors(self.kind[group])
            if not (sharded and self._goes_direct(self.kind[group], parameter, tensor))))

    def shared(self, group: int, rank: int, worker: int) -> Items:
        """What goes from rank number `rank` of a group straight to an engine's worker."""
        return self._once(("shared", self.kind[group], rank, worker), lambda: tuple(
            (parameter, tensor, box)
            for parameter, tensor in self._tensors(self.kind[group])
            for box in self._shared_boxes(self.kind[group], parameter, tensor, rank, worker)))

    def filled(self, group: int, items: Items, limit: int) -> tuple[Sized, ...]:
        """`loads.fill`, with the elements of every load."""
        fp8 = self.groups[group].fp8
        return self._once(("filled", id(items), limit), lambda: _sized(fill(items, limit, _grain(fp8)), fp8))

    def dealt(self, group: int, items: Items, limit: int, multiple: int, smallest: int) -> tuple[Sized, ...]:
        """`loads.deal`, with the elements of every load."""
        fp8 = self.groups[group].fp8
        return self._once(("dealt", id(items), limit, multiple),
                          lambda: _sized(deal(items, limit, multiple, smallest, _grain(fp8)), fp8))

    def sent(self, group: int) -> int:
        """Elements of a group that are sent in all; bytes, where they go in fp8."""
        return self._once(("sent", self.kind[group]),
                          lambda: _sized([self.everything(group, sharded=False)], self.groups[group].fp8)[0][2])

    def crossing(self) -> Iterator[str]:
        """The tensors that would go from shard to shard, if only these were whole blocks."""
        for number, group in enumerate(self.groups):
            for parameter, tensor in self._tensors(number) if group.fp8 else ():
                if self._shardable(number, parameter, tensor) and not self._in_whole_blocks(number, parameter, tensor):
                    yield group.tensors(parameter)[tensor].name

    def _class(self, group: GatherGroup, parameter: int) -> tuple:
        """What a parameter's boxes depend on: its rule, who is to have it, which expert of a stacked tensor it is."""
        entry, rule = group.entries[parameter], group.entries[parameter].rule
        kept = tuple(tensor.name in self.not_sharded for tensor in group.tensors(parameter)) if self.not_sharded else ()
        if not rule.expert:
            return rule, kept
        stacked = any("{expert}" not in name for name, _ in rule.hf)
        return (rule, kept, expert_block(entry.expert, self.spec.moe.num_experts, self.engines.ep),
                entry.expert if stacked else None)

    def _tensors(self, group: int) -> list[tuple[int, int]]:
        """Every tensor of every parameter, by number."""
        entries = self.groups[group].entries
        return [(number, tensor) for number, entry in enumerate(entries) for tensor in range(len(entry.rule.hf))]

    def _given(self, group: int, parameter: int) -> Given:
        held = self.groups[group]

        def compute() -> Given:
            column = held.column(parameter, self.te)
            return tuple(
                tuple(tuple(piece.hf_index for piece in param.pieces if piece.leaves and piece.hf == tensor.name)
                      for param in column)
                for tensor in held.tensors(parameter))

        return self._once(("given", self.classes[group][parameter]), compute)

    def _whole(self, group: int, parameter: int, tensor: int) -> Box:
        """The box that the ranks of a group hold between them. ValueError when it is none, or they hold it twice."""
        boxes = [box for of_rank in self._given(group, parameter)[tensor] for box in of_rank]
        box = hull(boxes)
        if sum(map(numel, boxes)) != numel(box):
            name = self.groups[group].tensors(parameter)[tensor].name
            raise ValueError(f"{name}: the ranks that gather it have {boxes}, which do not make up one box")
        return box

    def _held(self, group: int, parameter: int, tensor: int) -> tuple[tuple[Box, ...] | None, ...]:
        """What each worker of an engine holds of a tensor."""
        entry = self.groups[group].entries[parameter]

        def compute() -> tuple:
            shape = self.groups[group].tensors(parameter)[tensor].shape
            return tuple(held_boxes(entry.rule, tensor, shape, entry.expert, self.spec, self.engines, worker)
                         for worker in range(self.engines.world))

        return self._once(("held", self.classes[group][parameter], tensor), compute)

    def _goes_direct(self, group: int, parameter: int, tensor: int) -> bool:
        if not self._shardable(group, parameter, tensor):
            return False
        return not self.groups[group].fp8 or self._in_whole_blocks(group, parameter, tensor)

    def _shardable(self, group: int, parameter: int, tensor: int) -> bool:
        entry = self.groups[group].entries[parameter]
        if not shardable(entry.rule) or None in self._held(group, parameter, tensor):
            return False
        return not self.not_sharded or self.groups[group].tensors(parameter)[tensor].name not in self.not_sharded

    def _in_whole_blocks(self, group: int, parameter: int, tensor: int) -> bool:
        """Whether neither the trainer's shards nor the engine's cut through a block."""
        def compute() -> bool:
            shape = self.groups[group].tensors(parameter)[tensor].shape
            shards = (*self._given(group, parameter)[tensor], *self._held(group, parameter, tensor))
            return all(of_whole_blocks(box, shape) for boxes in shards for box in boxes)

        return self._once(("blocks", self.classes[group][parameter], tensor), compute)

    def _shared_boxes(self, group: int, parameter: int, tensor: int, rank: int, worker: int) -> tuple[Box, ...]:
        def compute() -> tuple[Box, ...]:
            if not self._goes_direct(group, parameter, tensor):
                return ()
            return tuple(box for given in self._given(group, parameter)[tensor][rank]
                         for held in self._held(group, parameter, tensor)[worker] if (box := intersection(given, held)))

        return self._once(("boxes", self.classes[group][parameter], tensor, rank, worker), compute)

    def _once(self, key: tuple, compute: Callable[[], T]) -> T:
        if key not in self.computed:
            self.computed[key] = compute()
        return self.computed[key]


def _grain(fp8: bool) -> int:
    """What boxes are cut at multiples of."""
    return BLOCK if fp8 else 1


def _sized(loads: Sequence[Items], fp8: bool) -> tuple[Sized, ...]:
    return tuple((items, numel, places([box for *_, box in items]).nbytes if fp8 else numel)
                 for items in loads for numel in [size(items)])
