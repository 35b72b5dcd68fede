"""The steps of one engine repeated for all: the order of all buckets, the replicas they come from, and sums over them.

Every engine gets every step, on replicas of its own where there are enough. Bucket number `slot * lanes + lane` is what
engine `lane` does at `slot`: all engines go through the tracks at the same pace, each from another start. A broadcast
has one lane for all engines.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Iterator, Mapping, NamedTuple, Sequence

import numpy as np

from mrl.reshard.buckets import BYTES, DTYPE_BYTES, Mode
from mrl.reshard.engine_layout import EngineLayout
from mrl.reshard.loads import Load
from mrl.reshard.params import GatherGroup
from mrl.reshard.strategy import Step, Track, interleave, turn_order


class Origin(NamedTuple):
    """Where a slice comes from: the global ranks that gather it, and which of them sends it."""

    ranks: tuple[int, ...]
    sender: int


@dataclass(frozen=True)
class Schedule:
    """The tracks of `strategy`, for all engines of a layout. `dtype`: of groups that have none of their own."""

    strategy: str
    dtype: str
    groups: Sequence[GatherGroup]
    tracks: Sequence[Track]
    engines: EngineLayout

    def held(self, step: Step) -> str:
        """The dtype of the parameters behind a bucket."""
        return self.groups[step.loads[0].group].dtype or self.dtype

    def dtype_of(self, step: Step) -> str:
        """The dtype that a bucket is sent in."""
        return BYTES if self.groups[step.loads[0].group].fp8 else self.held(step)

    def sent_bytes(self, step: Step, load: Load) -> int:
        """Bytes of one of a bucket's slices, as they are sent."""
        return load.sent * DTYPE_BYTES[self.dtype_of(step)]

    def gathered_bytes(self, step: Step, load: Load) -> int:
        """Bytes of one of a bucket's slices, as they are gathered."""
        return load.numel * DTYPE_BYTES[self.held(step)]

    @property
    def within_gpus(self) -> bool:
        """Whether slices go to workers on their senders' own GPUs, over no wire."""
        return False

    @property
    def lanes(self) -> int:
        """Engines, or 1 where all get the same buckets."""
        return 1 if self.strategy == "broadcast" else self.engines.count

    def mode(self, step: Step) -> Mode:
        """How the bucket of a step travels."""
        if step.worker is not None:
            return "direct"
        return "broadcast" if self.strategy == "broadcast" else "slices"

    def copies(self, step: Step) -> int:
        """How often the sender of a slice sends it: to how many workers, or by broadcast to how many engines."""
        counts = {"direct": 1, "broadcast": self.engines.count, "slices": self.engines.world // self.engines.node}
        return counts[self.mode(step)]

    @cached_property
    def slots(self) -> list[tuple[int, int]]:
        """By slot, the track and the place in it."""
        places = [[(number, at) for at in range(len(track.steps))] for number, track in enumerate(self.tracks)]
        return interleave(places)

    @cached_property
    def _slot_of(self) -> list[list[int]]:
        """By track and place in it, the slot."""
        slots = [[0] * len(track.steps) for track in self.tracks]
        for slot, (track, at) in enumerate(self.slots):
            slots[track][at] = slot
        return slots

    def targets(self, lane: int) -> tuple[int, ...]:
        """The engines of a lane."""
        return tuple(range(self.engines.count)) if self.strategy == "broadcast" else (lane,)

    @property
    def length(self) -> int:
        """Number of buckets."""
        return len(self.slots) * self.lanes

    def at(self, index: int) -> tuple[Step, int]:
        """The step and the lane of one bucket. IndexError beyond the last."""
        if not 0 <= index < self.length:
            raise IndexError(f"bucket {index} is not in 0…{self.length - 1}")
        slot, lane = divmod(index, self.lanes)
        number, at = self.slots[slot]
        track = self.tracks[number]
        return track.steps[(at + self._shift(track, lane)) % len(track.steps)], lane

    def of_lane(self, lane: int) -> range:
        """The buckets of one lane, in order."""
        return range(lane, self.length, self.lanes)

    def of_rank(self, rank: int) -> list[int]:
        """The buckets in which a trainer rank takes part, in order."""
        places = {number: divmod(rank - group.first, group.stride) for number, group in enumerate(self.groups)}
        mine = {number: place for number, place in places.items()
                if 0 <= place[0] < self.groups[number].replicas and place[1] < self.groups[number].size}
        found = []
        for number, track in enumerate(self.tracks):
            taken = [(at, step, replicas) for at, step in enumerate(track.steps)
                     if (replicas := _replicas_within_block(step, mine))]
            for lane in range(self.lanes):
                shift = self._shift(track, lane)
                for at, step, replicas in taken:
                    first = self.block(step, lane) * step.block
                    if any(mine_is == first + replica for mine_is, replica in replicas):
                        slot = self._slot_of[number][(at - shift) % len(track.steps)]
                        found.append(slot * self.lanes + lane)
        return sorted(found)

    def block(self, step: Step, lane: int) -> int:
        """The block of replicas that a lane takes a step from: lanes and turns are spread evenly over all blocks."""
        place = 2 * lane * step.turns + 2 * turn_order(step.turn, step.turns) + 1
        return place * step.blocks // (2 * step.turns * self.lanes)

    def replicas(self, step: Step, lane: int) -> Iterator[int]:
        """The replica of every slice's group."""
        first = self.block(step, lane) * step.block
        return (first + replica for replica, _ in step.senders)

    def origins(self, step: Step, lane: int) -> Iterator[Origin]:
        """Where every slice of a bucket comes from."""
        for load, replica, (_, rank) in zip(step.loads, self.replicas(step, lane), step.senders):
            ranks = self.groups[load.group].ranks(replica)
            yield Origin(ranks if step.worker is None else ranks[rank:rank + 1], ranks[rank])

    def senders(self, lane: int) -> tuple[int, ...]:
        """The ranks that send to a lane, ascending."""
        found = set()
        for track in self.tracks:
            for step in track.steps:
                found.update((load.group, replica, rank) for load, replica, (_, rank)
                             in zip(step.loads, self.replicas(step, lane), step.senders) if load.numel)
        return tuple(sorted({self.groups[group].ranks(replica)[rank] for group, replica, rank in found}))

    def _shift(self, track: Track, lane: int) -> int:
        """Steps by which a lane is ahead of slot 0: lanes that share replicas are spread over `track.spread` steps."""
        among = lane * track.steps[0].blocks % self.lanes
        return track.start + among * track.spread // self.lanes

    @cached_property
    def totals(self) -> Totals:
        """Bytes and messages of every rank and worker."""
        return _totals(self)


def _replicas_within_block(step: Step, mine: Mapping[int, tuple[int, int]]) -> list[tuple[int, int]]:
    """For every slice of a step that may need a rank: its replica of the slice's group, and the slice's in the block.

    mine: by group of the rank, its replica and its number within that. Of a direct slice only the sender is needed.
    """
    return [(mine[load.group][0], replica) for load, (replica, rank) in zip(step.loads, step.senders)
            if load.numel and load.group in mine and (step.worker is None or mine[load.group][1] == rank)]


@dataclass(frozen=True)
class Totals:
    """Sums over a whole sync. By global rank: bytes sent to engines, messages, bytes received in gathers. By worker of
    an engine: bytes received from trainers, messages, bytes received from the other workers of its node."""

    sent: np.ndarray
    sends: np.ndarray
    gathered: np.ndarray
    received: np.ndarray
    receives: np.ndarray
    passed_on: np.ndarray


def _totals(schedule: Schedule) -> Totals:
    steps = [step for track in schedule.tracks for step in track.steps]
    slices = [(at, schedule.groups[load.group], schedule.sent_bytes(step, load), replica, rank,
               schedule.gathered_bytes(step, load))
              for at, step in enumerate(steps) for load, (replica, rank) in zip(step.loads, step.senders) if load.numel]
    of_step, size, replica = (np.array([entry[i] for entry in slices], dtype=np.int64) for i in (0, 2, 3))
    first = np.array([group.first + rank for _, group, _, _, rank, _ in slices], dtype=np.int64)
    stride = np.array([group.stride for _, group, *_ in slices], dtype=np.int64)
    others = np.array([0 if steps[at].worker is not None else (group.size - 1) * held // group.size
                       for at, group, *_, held in slices], dtype=np.int64)
    copies = np.array([schedule.copies(steps[at]) for at, *_ in slices], dtype=np.int64)
    layout = schedule.groups[0].layout
    sent, sends, gathered = (np.zeros(layout.world, dtype=np.int64) for _ in range(3))
    block, blocks, turn, turns = (
        np.array(values, dtype=np.int64) for values in zip(*(
            (step.block, step.blocks, turn_order(step.turn, step.turns), step.turns) for step in steps)))
    for lane in range(schedule.lanes):
        chosen = (2 * lane * turns + 2 * turn + 1) * blocks // (2 * turns * schedule.lanes) * block
        ranks = first + (chosen[of_step] + replica) * stride
        np.add.at(sent, ranks, size * copies)
        np.add.at(sends, ranks, copies)
        np.add.at(gathered, ranks, others)
    return Totals(sent, sends, gathered, *worker_totals(schedule, steps))


def worker_totals(schedule: Schedule, steps: list[Step]) -> tuple[np.ndarray, ...]:
    """The last three of `Totals`."""
    world, node = schedule.engines.world, schedule.engines.node
    received, receives, passed_on = (np.zeros(world, dtype=np.int64) for _ in range(3))
    for step in steps:
        mode = schedule.mode(step)
        for at, load in enumerate(step.loads):
            workers = {"direct": step.worker, "broadcast": slice(None), "slices": slice(at, None, node)}[mode]
            received[workers] += schedule.sent_bytes(step, load)
            receives[workers] += load.numel > 0
        if mode == "slices":
            passed_on += (node - 1) * max(schedule.sent_bytes(step, load) for load in step.loads)
    return received, receives, passed_on
