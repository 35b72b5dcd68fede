"""The plan of a weight sync: who gathers what among whom, and who sends which bytes to whom.

Pure: it depends on its arguments alone, needs no torch, and is the same on every rank. `plan_sync` computes order, size
and ways of all buckets at once; what lies in a bucket is computed when it is asked for, so that a rank or an engine
pays for its own share only. `views.py` turns buckets into copies between tensors.

There is one order of all buckets, and every rank and worker goes through its own ones in that order: then no two of
them can wait for each other in a circle.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from mrl.reshard.bounds import lower_bound_s, predicted_s
from mrl.reshard.buckets import (
    BYTES, DTYPE_BYTES, WEIGHT_DTYPES, Bucket, Contribution, Outline, Part, Slice, SliceOutline,
)
from mrl.reshard.contents import Contents
from mrl.reshard.engine_layout import EngineLayout
from mrl.reshard.fp8 import fp8_problems
from mrl.reshard.layout import Layout
from mrl.reshard.loads import Load
from mrl.reshard.network import Network
from mrl.reshard.params import gather_groups
from mrl.reshard.parts import parts_of, shards_of
from mrl.reshard.pinned import PinnedSchedule, Pins, check_pins
from mrl.reshard.schedule import Schedule
from mrl.reshard.spec import ModelSpec
from mrl.reshard.strategy import STRATEGIES, Task, multi_sender
from mrl.reshard.wire import to_wire

Strategy = Literal["broadcast", "multi_sender", "sharded"]

_CLEARLY = 0.95  # of the predicted time of a simpler strategy is what a less simple one may take to be chosen


@dataclass(frozen=True, slots=True)
class SyncOptions:
    """How a sync is to be planned.

    `bucket_bytes`: the most that a flat bucket, all its slices together, may have before anything is quantised.
    `dtype`: name of the dtype the weights are in. `te`: see `local_params`.
    `fp8`: projections are sent in blockwise fp8 (`fp8.py`).
    `not_sharded`: HF tensors that must not go from shard to shard, because the engine holds them otherwise.
    `smallest_bytes`: slices of fewer bytes are not made just to use more senders.
    `pinned`: by engine and worker, the one rank that sends to it, in slices; None: whichever the strategy says.
    ValueError for an unknown dtype or strategy, a strategy that lets no sender be pinned, and a bucket that has no room
    for an element.
    """

    bucket_bytes: int
    dtype: str
    te: bool
    strategy: Literal["auto", "broadcast", "multi_sender", "sharded"] = "auto"
    not_sharded: frozenset[str] = field(default=frozenset())
    smallest_bytes: int = 1 << 20
    pinned: Pins | None = None
    fp8: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in WEIGHT_DTYPES:
            raise ValueError(f"dtype {self.dtype!r} cannot be synced; known are {', '.join(WEIGHT_DTYPES)}")
        if self.strategy not in ("auto", *STRATEGIES):
            raise ValueError(f"strategy {self.strategy!r} is not known; known are auto, {', '.join(STRATEGIES)}")
        if self.pinned is not None and self.strategy not in ("auto", "multi_sender"):
            raise ValueError(f"strategy {self.strategy!r} chooses its senders itself: pin them with multi_sender")
        if self.bucket_bytes < max(DTYPE_BYTES.values()):
            raise ValueError(f"bucket_bytes is {self.bucket_bytes}, but must be at least {max(DTYPE_BYTES.values())}, "
                             "one element of any dtype")


class Outlines(Sequence[Outline]):
    """Every bucket of a plan in brief, computed when it is asked for."""

    def __init__(self, schedule: Schedule):
        self._schedule = schedule

    def __len__(self) -> int:
        return self._schedule.length

    def __getitem__(self, index: int) -> Outline:
        schedule = self._schedule
        step, lane = schedule.at(index)
        slices = tuple(SliceOutline(schedule.sent_bytes(step, load), schedule.gathered_bytes(step, load), *origin)
                       for load, origin in zip(step.loads, schedule.origins(step, lane)))
        return Outline(index, schedule.dtype_of(step), schedule.mode(step), schedule.targets(lane), step.worker,
                       step.stage, slices)


@dataclass(frozen=True)
class SyncPlan:
    """All buckets of one sync, in order. Made by `plan_sync`, of whose arguments it keeps all but the model, which
    `contents` knows.

    strategy: the one planned. predictions: seconds of every strategy that was considered, by name.
    """

    strategy: Strategy
    predictions: Mapping[str, float]
    options: SyncOptions
    layout: Layout
    engine_layout: EngineLayout
    network: Network
    schedule: Schedule = field(repr=False)
    contents: Contents = field(repr=False, compare=False)
    total_bytes: int
    """Of the model: all HF tensors once."""

    @property
    def outline(self) -> Sequence[Outline]:
        """Every bucket in brief; item i is that of bucket i."""
        return Outlines(self.schedule)

    def outline_of_rank(self, rank: int) -> Iterator[Outline]:
        """The buckets in which a trainer rank takes part, in brief and in order."""
        outline = self.outline
        return (outline[index] for index in self.schedule.of_rank(rank))

    def bucket(self, index: int) -> Bucket:
        """One bucket with its contents. IndexError for one that is not there."""
        return self._bucket(index, lambda outline: True, shards=True)

    def of_rank(self, rank: int) -> Iterator[Bucket]:
        """The buckets in which a trainer rank takes part, in order.

        Slices that it takes no part in have neither parts nor shards there.
        """
        for index in self.schedule.of_rank(rank):
            yield self._bucket(index, lambda outline: rank in outline.ranks, shards=True)

    def of_engine(self, engine: int, worker: int | None = None) -> Iterator[Bucket]:
        """The buckets that reach an engine (one of its workers), in order; without shards."""
        for index in self.schedule.of_lane(engine % self.schedule.lanes):
            step, _ = self.schedule.at(index)
            if worker is None or step.worker in (None, worker):
                yield self._bucket(index, lambda outline: True, shards=False)

    def _bucket(self, index: int, wanted: Callable[[SliceOutline], bool], shards: bool) -> Bucket:
        """A bucket with the contents of the slices that are `wanted`, and perhaps what every rank gives to them."""
        step, _ = self.schedule.at(index)
        outline = self.outline[index]
        slices = []
        for load, brief, (_, rank) in zip(step.loads, outline.slices, step.senders):
            parts, given = (), ()
            if load.numel and wanted(brief):
                parts = self._parts(load)
                if shards:
                    given = self._shards(load, None if step.worker is None else rank)
                    given += ((),) * (len(brief.ranks) - len(given))  # of a pinned sender that holds nothing
            slices.append(Slice(load.numel, load.sent, parts, brief.ranks, brief.sender, given))
        return Bucket(index, outline.dtype, self.schedule.held(step), outline.mode, outline.engines, outline.worker,
                      tuple(slices))

    def _parts(self, load: Load) -> tuple[Part, ...]:
        return parts_of(load, self.schedule.groups[load.group])

    def _shards(self, load: Load, rank: int | None) -> tuple[tuple[Contribution, ...], ...]:
        return shards_of(load, self.schedule.groups[load.group], self.options.te, rank)

    def senders(self, engine: int) -> tuple[int, ...]:
        """The trainer ranks that send to an engine, ascending."""
        return self.schedule.senders(engine % self.schedule.lanes)

    @cached_property
    def max_bucket_bytes(self) -> int:
        """Bytes of the largest flat bucket."""
        return max(len(step.loads) * max(self.schedule.sent_bytes(step, load) for load in step.loads)
                   for track in self.schedule.tracks for step in track.steps)

    @property
    def bytes_by_sender(self) -> Mapping[int, int]:
        """Bytes that each sending rank puts on the network, to all engines; a broadcast counts once an engine."""
        sent = self.schedule.totals.sent
        return {rank: int(sent[rank]) for rank in sent.nonzero()[0].tolist()}

    @property
    def bytes_by_worker(self) -> tuple[int, ...]:
        """Bytes that each worker of any engine takes from the network. All engines' are equal."""
        return tuple(self.schedule.totals.received.tolist())

    @property
    def lower_bound_s(self) -> float:
        """Seconds that no execution of this plan can beat on `network` (`bounds.py`)."""
        return lower_bound_s(self.schedule, self.network)

    @property
    def predicted_s(self) -> float:
        """Seconds that this plan should take on `network` (`bounds.py`)."""
        return self.predictions[self.strategy]

    def to_wire(self, engine: int) -> dict[str, Any]:
        """What the receivers of one engine need, as plain JSON types, in the form that `mrl_receiver/wire.py` reads."""
        return to_wire(self.schedule, engine)


def plan_sync(
    spec: ModelSpec, layout: Layout, engine_layout: EngineLayout, options: SyncOptions, network: Network = Network(),
) -> SyncPlan:
    """Plans a sync of the model from trainers laid out as `layout` to engines laid out as `engine_layout`.

    broadcast     replica 0 alone sends, one rank a gather group, to all workers of all engines
    multi_sender  slices dealt over all ranks, replicas and stages; workers of a node pass them on to each other
    sharded       MLPs, experts and attention projections go from shard to shard; the rest as in multi_sender
    auto          the one of least predicted time; with `options.pinned`, multi_sender

    A dense parameter is gathered among the tp ranks of one replica, an expert's among the etp ranks that hold it. HF
    elements that several ranks hold leave from one of them. ValueError for an unknown dtype or strategy, a bucket size
    below one element, a layout that does not fit the model, pinned ranks that do not fit layout and engines, and with
    fp8 a model that cannot be quantised or slices without room for a block.
    """
    if options.fp8 and (problems := fp8_problems(spec)):
        raise ValueError("; ".join(problems))
    groups = tuple(gather_groups(spec, layout, options.fp8))
    contents = Contents(groups, options.te, engine_layout, options.not_sharded)
    task = Task(groups, contents, engine_layout, options.dtype, options.bucket_bytes, options.smallest_bytes)
    if options.pinned is not None:
        check_pins(options.pinned, layout, engine_layout)
        schedules = {"multi_sender": PinnedSchedule("multi_sender", options.dtype, groups, multi_sender(task),
                                                    engine_layout, options.pinned)}
    else:
        schedules = {name: Schedule(name, options.dtype, groups, strategy(task), engine_layout)
                     for name, strategy in STRATEGIES.items() if options.strategy in ("auto", name)}
    predictions = {name: predicted_s(schedule, network) for name, schedule in schedules.items()}
    chosen = _choose(predictions)
    total_bytes = sum(contents.sent(number) * DTYPE_BYTES[BYTES if group.fp8 else group.dtype or options.dtype]
                      for number, group in enumerate(groups))
    return SyncPlan(chosen, predictions, options, layout, engine_layout, network, schedules[chosen], contents,
                    total_bytes)


def _choose(predictions: Mapping[str, float]) -> str:
    """The least predicted time; of about equal ones the simplest strategy, which comes first."""
    best, *others = predictions
    for name in others:
        if predictions[name] < _CLEARLY * predictions[best]:
            best = name
    return best
