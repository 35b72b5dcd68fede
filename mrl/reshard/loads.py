"""What slices carry: boxes of the tensors of one gather group, packed up to a size or dealt out evenly."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Sequence

from mrl.reshard.boxes import Box, cut, numel, pieces_of, rows_below

Item = tuple[int, int, Box]
"""A box of an HF tensor of a gather group: number of the parameter in the group, of the tensor in its rule, and box."""
Items = tuple[Item, ...]

_WASTE = 1.1  # how much longer than its even share the longest slice may be for the sake of whole tensors


@dataclass(frozen=True, slots=True)
class Load:
    """The contents of one slice, whichever replica it comes from. `group`: number of the gather group in the plan.

    `numel`: elements that are gathered. `sent`: elements of the bucket that travel, which are bytes where it is fp8.
    """

    group: int
    items: Items
    numel: int
    sent: int


def size(items: Sequence[Item]) -> int:
    """Elements of all boxes."""
    return sum(numel(box) for _, _, box in items)


def fill(items: Sequence[Item], limit: int, grain: int = 1) -> list[Items]:
    """Consecutive items of at most `limit` elements together. Only a tensor that alone has more is cut, by rows of
    `grain`."""
    loads: list[Items] = []
    load: list[Item] = []
    filled = 0
    for parameter, tensor, box in items:
        for part in pieces_of(box, limit, grain):
            if load and filled + numel(part) > limit:
                loads.append(tuple(load))
                load, filled = [], 0
            load.append((parameter, tensor, part))
            filled += numel(part)
    return [*loads, tuple(load)] if load else loads


def deal(items: Sequence[Item], limit: int, multiple: int, smallest: int, grain: int = 1) -> list[Items]:
    """Consecutive items in loads of about the same size and at most `limit` elements; their number is a multiple of
    `multiple`, or a little less.

    Tensors are cut, by rows of `grain`, where whole ones would make the loads too uneven. There are fewer loads, of any
    number, where so many would have fewer than `smallest` elements each. `limit` must have room for a square of
    `grain`.
    """
    total = size(items)
    needed = -(-total // limit)
    count = _round_up(needed, multiple)
    if total < count * smallest:
        count, multiple = max(needed, total // smallest), 1
    whole = fill(items, max(1, min(limit, int(_WASTE * total / count))), grain)
    if max(map(size, whole)) * _round_up(len(whole), multiple) <= _WASTE * total:
        return whole
    while True:
        loads = _even(items, count, grain)
        if max(map(size, loads)) <= limit:
            return loads
        count += multiple


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _even(items: Sequence[Item], count: int, grain: int) -> list[Items]:
    """Loads whose sizes differ by less than a row; at most `count`, unless a square of `grain` is more than a share."""
    rest = size(items)
    share = max(grain * grain, rest // count)
    left = deque((parameter, tensor, part) for parameter, tensor, box in items
                 for part in rows_below(box, share, grain))
    loads: list[Items] = []
    while left:
        room = max(share, -(-rest // max(1, count - len(loads))))
        load: list[Item] = []
        while left and room:
            parameter, tensor, box = left.popleft()
            head, tail = cut(box, room, grain)
            if head is not None:
                load.append((parameter, tensor, head))
                room -= numel(head)
                rest -= numel(head)
            if tail is not None:
                left.appendleft((parameter, tensor, tail))
                break
        loads.append(tuple(load))
    return loads
