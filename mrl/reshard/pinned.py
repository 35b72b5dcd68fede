"""A schedule in which each worker's slices come from one given rank, wherever they are gathered from.

For engines on the trainers' own GPUs: what never leaves a GPU can go from one rank to one worker only.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Iterator, Sequence

import numpy as np

from mrl.reshard.engine_layout import EngineLayout
from mrl.reshard.layout import Layout
from mrl.reshard.schedule import Origin, Schedule, Totals, worker_totals
from mrl.reshard.strategy import Step

Pins = tuple[tuple[int, ...], ...]
"""By engine and worker, the global rank that sends to it."""


@dataclass(frozen=True)
class PinnedSchedule(Schedule):
    """The tracks of `multi_sender`; only the slices' places in their buckets matter, not the senders dealt out there.

    A slice is gathered on the replica nearest to its sender, which joins the group's ranks if it is none of them.
    """

    pins: Pins

    @property
    def within_gpus(self) -> bool:
        """See `Schedule`."""
        return True

    def origins(self, step: Step, lane: int) -> Iterator[Origin]:
        """See `Schedule`."""
        for load, sender in zip(step.loads, self.pins[lane], strict=True):
            ranks = self.groups[load.group].ranks_near(sender)
            yield Origin(ranks if sender in ranks else (*ranks, sender), sender)

    def of_rank(self, rank: int) -> list[int]:
        """The buckets in which a trainer rank takes part, in order."""
        return [index for index in range(self.length)
                if any(rank in origin.ranks for _, origin in self._filled(*self.at(index)))]

    def senders(self, lane: int) -> tuple[int, ...]:
        """The ranks that send to a lane, ascending."""
        return tuple(sorted({origin.sender for track in self.tracks for step in track.steps
                             for _, origin in self._filled(step, lane)}))

    @cached_property
    def totals(self) -> Totals:
        """Bytes and messages of every rank and worker."""
        steps = [step for track in self.tracks for step in track.steps]
        sent, sends, gathered = (np.zeros(self.groups[0].layout.world, dtype=np.int64) for _ in range(3))
        for step in steps:
            for lane in range(self.lanes):
                for load, (ranks, sender) in self._filled(step, lane):
                    size, nbytes = self.groups[load.group].size, self.gathered_bytes(step, load)
                    sent[sender] += self.sent_bytes(step, load)
                    sends[sender] += 1
                    gathered[sender] += nbytes if len(ranks) > size else nbytes * (size - 1) // size
        return Totals(sent, sends, gathered, *worker_totals(self, steps))

    def _filled(self, step: Step, lane: int) -> Iterator[tuple]:
        """The loads of a step that hold something, and their origins."""
        return ((load, origin) for load, origin in zip(step.loads, self.origins(step, lane)) if load.numel)


def check_pins(pins: Sequence[Sequence[int]], layout: Layout, engines: EngineLayout) -> None:
    """ValueError where `pins` are not one rank for each worker of each engine, or an engine spans nodes."""
    if engines.node != engines.world:
        raise ValueError(f"senders can be pinned only to engines inside a node: an engine has {engines.world} workers, "
                         f"which do not divide the {engines.gpus_per_node} GPUs of one")
    if len(pins) != engines.count or any(len(of_engine) != engines.world for of_engine in pins):
        raise ValueError(f"pinned is {pins}, but must name a rank for each of {engines.world} workers of "
                         f"{engines.count} engines")
    if strangers := sorted({rank for of_engine in pins for rank in of_engine if not 0 <= rank < layout.world}):
        raise ValueError(f"pinned names ranks {strangers}, which are not in 0…{layout.world - 1}")
