"""The three strategies: which slices there are, and from which rank of a gather group each comes.

Everything here is for one engine: `schedule.py` repeats it for the others, on other replicas and in another order.
"""
from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from math import gcd, lcm
from typing import Callable, Iterable, Mapping, Sequence, TypeVar

from mrl.reshard.buckets import DTYPE_BYTES
from mrl.reshard.contents import Contents, Sized
from mrl.reshard.engine_layout import EngineLayout
from mrl.reshard.fp8 import BLOCK
from mrl.reshard.loads import Items, Load
from mrl.reshard.params import GatherGroup

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Step:
    """A bucket before it is known which replicas it comes from.

    loads: one a slice. senders: for every slice (replica within the block, rank within the group).
    block: replicas that share the slices of one bucket; a bucket comes from one block. blocks: how many there are.
    turn, turns: buckets of the same ranks are dealt over the blocks; this one is number `turn` of `turns`.
    worker: the receiving worker of a direct bucket, else None.
    """

    stage: int
    loads: tuple[Load, ...]
    senders: tuple[tuple[int, int], ...]
    block: int
    blocks: int
    turn: int
    turns: int
    worker: int | None = None


@dataclass(frozen=True, slots=True)
class Track:
    """Steps that follow each other. `start`: where the first engine begins, with those before it at the end.

    `spread`: steps over which other engines that the same ranks send to begin, so that they do not meet at one rank.
    """

    steps: tuple[Step, ...]
    start: int = 0
    spread: int = 1


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be planned. `bucket_bytes`: of a whole bucket, as it is gathered; `smallest_bytes`: below which slices
    are not cut.

    `dtype`: of groups that have none of their own.
    """

    groups: Sequence[GatherGroup]
    contents: Contents
    engines: EngineLayout
    dtype: str
    bucket_bytes: int
    smallest_bytes: int

    def filled(self, group: int, items: Items) -> Sequence[Sized]:
        """Whole tensors of a group, packed into buckets."""
        return self.contents.filled(group, items, self._limit(group, 1))

    def dealt(self, group: int, items: Items, slices: int, multiple: int) -> Sequence[Sized]:
        """Boxes of a group, dealt over a multiple of `multiple` slices of which a bucket has `slices`."""
        return self.contents.dealt(group, items, self._limit(group, slices), multiple,
                                   -(-self.smallest_bytes // self._itemsize(group)))

    def _limit(self, group: int, slices: int) -> int:
        """Elements that each slice has room for."""
        limit = max(1, self.bucket_bytes // self._itemsize(group) // slices)
        if self.groups[group].fp8 and limit < BLOCK * BLOCK:
            raise ValueError(f"bucket_bytes is {self.bucket_bytes}, but for fp8 each of {slices} slices needs room for "
                             f"{BLOCK} x {BLOCK} elements of {self._itemsize(group)} bytes")
        return limit

    def _itemsize(self, group: int) -> int:
        return DTYPE_BYTES[self.groups[group].dtype or self.dtype]


def broadcast(task: Task) -> list[Track]:
    """From replica 0, one sender a group, to all workers."""
    sequences = []
    for number, group in enumerate(task.groups):
        loads = task.filled(number, task.contents.everything(number, sharded=False))
        sequences.append([Step(group.stage, (Load(number, *load),), ((0, 0),), 1, 1, 0, 1) for load in loads])
    return [Track(tuple(interleave(sequences)))]


def multi_sender(task: Task) -> list[Track]:
    """Every rank sends slices, one slice of a bucket to each worker of a node."""
    return _in_slices(task, sharded=False)


def sharded(task: Task) -> list[Track]:
    """From shard to shard; what cannot go that way, in slices."""
    direct = [*_shard_to_shard(task, experts=True), *_shard_to_shard(task, experts=False)]
    return [*_in_slices(task, sharded=True), *direct]


STRATEGIES: Mapping[str, Callable[[Task], list[Track]]] = {
    "broadcast": broadcast, "multi_sender": multi_sender, "sharded": sharded,
}


def interleave(sequences: Iterable[Sequence[T]]) -> list[T]:
    """All sequences in one, each spread evenly over its length."""
    keyed = [((2 * at + 1) / (2 * len(sequence)), number, item)
             for number, sequence in enumerate(sequences) for at, item in enumerate(sequence)]
    return [item for _, _, item in sorted(keyed, key=lambda entry: entry[:2])]


def _in_slices(task: Task, sharded: bool) -> list[Track]:
    """The track of all buckets in slices, those of all stages in turn. `sharded`: less what goes shard to shard."""
    sequences, spread = [], 0
    for _, pool in groupby(enumerate(task.groups), key=lambda entry: _pool(entry[1])):
        contents = {number: items for number, _ in pool if (items := task.contents.everything(number, sharded))}
        if contents:
            steps = _pool_steps(task, contents)
            sequences.append(steps)
            ranks = sum(task.groups[number].size for number in contents) * steps[0].block
            spread += max(1, ranks // task.engines.node)
    steps = tuple(interleave(sequences))
    return [Track(steps, spread=min(spread, len(steps)))] if steps else []


def _pool(group: GatherGroup) -> tuple:
    """Equal for groups whose slices may share buckets."""
    return group.stage, group.ep is None, group.dtype, group.fp8


def _pool_steps(task: Task, contents: dict[int, Items]) -> list[Step]:
    """Buckets in slices of `contents`, from groups of one pool: neighbouring slices come from other ranks."""
    slices, group = task.engines.node, task.groups[next(iter(contents))]
    block = min(group.replicas, -(-slices // (len(contents) * group.size)))
    blocks = group.replicas // block
    buckets = -(-blocks // task.engines.count)  # over which the blocks that serve one engine are dealt
    multiple = lcm(slices * buckets, len(contents)) // len(contents)
    dealt = {number: task.dealt(number, items, slices, multiple) for number, items in contents.items()}
    sent: list[tuple[Load, tuple[int, int]]] = []
    for turn in range(max(map(len, dealt.values()))):
        sender = (turn // group.size % block, turn % group.size)
        sent += [(Load(number, *loads[turn]), sender) for number, loads in dealt.items() if turn < len(loads)]
    turns = -(-len(sent) // slices)
    steps = []
    for turn in range(turns):
        inside = sent[turn * slices:(turn + 1) * slices]
        nothing = (Load(inside[0][0].group, (), 0, 0), inside[0][1])
        loads, senders = zip(*inside, *[nothing] * (slices - len(inside)))
        steps.append(Step(group.stage, loads, senders, block, blocks, turn, turns))
    return steps


def _shard_to_shard(task: Task, experts: bool) -> list[Track]:
    """A track for every worker, through all ranks that have something for it, beginning with another than its peers."""
    workers = range(task.engines.world)
    to_worker: list[list[tuple[int, Step]]] = [[] for _ in workers]
    served: dict[tuple[int, int], list[int]] = {}
    for number, group in enumerate(task.groups):
        if (group.ep is not None) != experts:
            continue
        for rank in range(group.size):
            shares = {worker: items for worker in workers if (items := task.contents.shared(number, rank, worker))}
            served[number, rank] = [*shares]
            multiple = -(-group.replicas // (task.engines.count * max(1, len(shares))))
            loads = [(worker, at, Load(number, *load)) for worker, items in shares.items()
                     for at, load in enumerate(task.dealt(number, items, 1, multiple))]
            for turn, (worker, at, load) in enumerate(loads):
                to_worker[worker].append((at, Step(
                    group.stage, (load,), ((0, rank),), 1, group.replicas, turn, len(loads), worker)))
    return [_worker_track(worker, steps, served) for worker, steps in enumerate(to_worker) if steps]


def _worker_track(worker: int, steps: list[tuple[int, Step]], served: dict[tuple[int, int], list[int]]) -> Track:
    """All steps of one worker, one pass through all ranks after the other. `served`: the workers of every rank."""
    steps.sort(key=lambda entry: entry[0])
    ranks = {_rank(step) for _, step in steps}
    peers = served[_rank(steps[0][1])]
    start = peers.index(worker) * len(ranks) // len(peers)
    return Track(tuple(step for _, step in steps), start, max(1, len(ranks) // len(peers)))


def _rank(step: Step) -> tuple[int, int]:
    """The sender of a direct bucket, on any replica: number of its group, and rank within it."""
    return step.loads[0].group, step.senders[0][1]


def turn_order(turn: int, turns: int) -> int:
    """A permutation of 0 … turns-1 that puts neighbours far from each other: steps of about the golden ratio."""
    stride = max(1, round(0.618 * turns))
    while gcd(stride, turns) > 1:
        stride += 1
    return turn * stride % turns
