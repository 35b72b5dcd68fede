"""The plan of a weight sync: who gathers what among whom, and who sends which bytes to whom.

Pure: it depends on its arguments alone, needs no torch, and is the same on every rank. `plan_sync` computes the order and
the size of every bucket at once; what lies in a bucket is computed when it is asked for, so that a rank or an engine pays
for its own share only. `views.py` turns buckets into copies between tensors.

There is one order of all buckets, and every rank and worker goes through its own ones in that order: then no two of them
can wait for each other in a circle.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any, Iterator, Literal, Mapping, Sequence

from mrl.reshard.engine_layout import EngineLayout
from mrl.reshard.layout import Layout
from mrl.reshard.network import Network
from mrl.reshard.pieces import Box, Piece, Shape
from mrl.reshard.spec import ModelSpec

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

Strategy = Literal["broadcast", "multi_sender", "sharded"]
Mode = Literal["broadcast", "slices", "direct"]


@dataclass(frozen=True, slots=True)
class SyncOptions:
    """How a sync is to be planned.

    `bucket_bytes`: the most that a flat bucket, all its slices together, may have.
    `dtype`: name of the dtype the weights leave in. `te`: see `local_params`.
    `not_sharded`: HF tensors that must not go from shard to shard, because the engine holds them otherwise.
    `smallest_bytes`: slices of fewer bytes are not made just to use more senders.
    """

    bucket_bytes: int
    dtype: str
    te: bool
    strategy: Literal["auto", "broadcast", "multi_sender", "sharded"] = "auto"
    not_sharded: frozenset[str] = field(default=frozenset())
    smallest_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """A box of the HF tensor `name` of shape `shape`: elements offset … offset + numel of its slice, row-major."""

    name: str
    shape: Shape
    box: Box
    offset: int

    @property
    def box_shape(self) -> Shape:
        """Sizes of the box."""
        return tuple(stop - start for start, stop in self.box)

    @property
    def numel(self) -> int:
        """Elements of the box."""
        return prod(self.box_shape)

    @property
    def whole(self) -> bool:
        """Whether the box is the tensor."""
        return self.box_shape == self.shape


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one rank gives from one of its parameters: `pieces`, all of which leave, each inside one part of the slice."""

    param: str
    param_shape: Shape
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        """Elements given."""
        return sum(piece.numel for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Slice:
    """What one rank sends at once: parts one behind the other, `numel` elements.

    `ranks`: the global trainer ranks that hold its elements between them; `sender` is one of them. Rank `ranks[m]` packs
    the pieces of `shards[m]` in that order, each row-major over `piece.shape`, without gaps; the packed lengths may
    differ. With one rank there is nothing to gather. A slice with no elements is neither gathered nor sent.
    """

    numel: int
    parts: tuple[Part, ...]
    ranks: tuple[int, ...]
    sender: int
    shards: tuple[tuple[Contribution, ...], ...]

    @property
    def packed_numel(self) -> int:
        """Elements of the longest contribution: what the gather pads to."""
        return max((sum(given.numel for given in shard) for shard in self.shards), default=0)


@dataclass(frozen=True, slots=True)
class Bucket:
    """One flat message of one dtype. Slice s lies at s * slice_numel of it.

    mode
        broadcast   one slice: its sender broadcasts it to all workers of each of `engines`
        slices      n slices, n = `EngineLayout.node`: slice s goes from its sender to the workers s, s + n, s + 2n, …;
                    then the n workers of each node all-gather in place
        direct      one slice of one rank, to `worker` alone

    Only the `numel` elements of a slice travel to the engine; the all-gather moves `slice_numel` of each.
    Buckets that do not broadcast have a single engine.
    """

    index: int
    dtype: str
    mode: Mode
    engines: tuple[int, ...]
    worker: int | None
    slices: tuple[Slice, ...]

    @property
    def slice_numel(self) -> int:
        """Elements of the largest slice."""
        return max(one.numel for one in self.slices)

    @property
    def numel(self) -> int:
        """Elements of the flat bucket."""
        return len(self.slices) * self.slice_numel

    @property
    def nbytes(self) -> int:
        """Bytes of the flat bucket."""
        return self.numel * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class SliceOutline:
    """A slice without its contents: bytes, ranks that hold them, and the one that sends them."""

    nbytes: int
    ranks: tuple[int, ...]
    sender: int


@dataclass(frozen=True, slots=True)
class Outline:
    """A bucket without its contents. `stage`: the pipeline stage whose ranks give it."""

    index: int
    mode: Mode
    engines: tuple[int, ...]
    worker: int | None
    stage: int
    slices: tuple[SliceOutline, ...]


class SyncPlan:
    """All buckets of one sync, in order. Made by `plan_sync`.

    strategy: the one planned. predictions: seconds of every strategy that was considered, by name. options, layout,
    engine_layout, network: the arguments.
    """

    strategy: Strategy
    predictions: Mapping[str, float]
    options: SyncOptions
    layout: Layout
    engine_layout: EngineLayout
    network: Network

    @property
    def outline(self) -> Sequence[Outline]:
        """Every bucket in brief; item i is that of bucket i."""
        raise NotImplementedError

    def bucket(self, index: int) -> Bucket:
        """One bucket with its contents."""
        raise NotImplementedError

    def of_rank(self, rank: int) -> Iterator[Bucket]:
        """The buckets in which a trainer rank takes part, in order.

        Slices that it takes no part in have neither parts nor shards there.
        """
        raise NotImplementedError

    def of_engine(self, engine: int, worker: int | None = None) -> Iterator[Bucket]:
        """The buckets that reach an engine (one of its workers), in order; without shards."""
        raise NotImplementedError

    @property
    def gather_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Every set of several ranks that gather something, each once: `Slice.ranks`, in the order all ranks share."""
        raise NotImplementedError

    def senders(self, engine: int) -> tuple[int, ...]:
        """The trainer ranks that send to an engine, ascending."""
        raise NotImplementedError

    @property
    def total_bytes(self) -> int:
        """Bytes of the model: all HF tensors once."""
        raise NotImplementedError

    @property
    def max_slice_numel(self) -> int:
        """Elements of the largest slice."""
        raise NotImplementedError

    @property
    def max_bucket_numel(self) -> int:
        """Elements of the largest flat bucket."""
        raise NotImplementedError

    @property
    def bytes_by_sender(self) -> Mapping[int, int]:
        """Bytes that each sending rank puts on the network, to all engines; a broadcast counts once an engine."""
        raise NotImplementedError

    @property
    def bytes_by_worker(self) -> tuple[int, ...]:
        """Bytes that each worker of any engine takes from the network. All engines' are equal."""
        raise NotImplementedError

    @property
    def lower_bound_s(self) -> float:
        """Seconds that no execution of this plan can beat on `network`."""
        raise NotImplementedError

    @property
    def predicted_s(self) -> float:
        """Seconds that this plan should take on `network`."""
        raise NotImplementedError

    def to_wire(self, engine: int) -> dict[str, Any]:
        """What the receivers of one engine need, as plain JSON types; its form is described in `mrl_receiver/wire.py`."""
        raise NotImplementedError

    @property
    def digest(self) -> str:
        """Tells plans apart."""
        raise NotImplementedError


def plan_sync(
    spec: ModelSpec, layout: Layout, engine_layout: EngineLayout, options: SyncOptions, network: Network = Network(),
) -> SyncPlan:
    """Plans a sync of the model from trainers laid out as `layout` to engines laid out as `engine_layout`.

    broadcast     replica 0 alone sends, one rank a gather group, to all workers of all engines
    multi_sender  slices dealt over all ranks, replicas and stages; workers of a node pass them on to each other
    sharded       MLPs, experts and attention projections go from shard to shard; the rest as in multi_sender
    auto          the one of least predicted time

    A dense parameter is gathered among the tp ranks of one replica, an expert's among the etp ranks that hold it. HF
    elements that several ranks hold leave from one of them. ValueError for an unknown dtype or strategy, a bucket size
    below one element, and a layout that does not fit the model.
    """
    raise NotImplementedError
