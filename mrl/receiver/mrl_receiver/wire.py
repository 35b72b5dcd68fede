"""The words of a sync, as both ends speak them: plan, request, holdings, store keys. Everything is JSON on the way.

A version is a pair [attempt, step]. The wire form of a plan, which is one engine's share of it, holds

    workers    number of the engine's workers W
    node       workers on one engine node n; W is a multiple of it
    senders    number of trainer ranks that send to this engine; below they are named by their position in that order
    tensors    {HF name: [shape]} of every tensor; below they are named by their position in this order
    groups     lists of tensors
    contents   what lies in slices, as lists of parts [place, box, offset] or, in buckets of dtype uint8, [place, box,
               offset, dtype]; place: of the tensor in the slice's group; box: [[start, stop] a dimension], null for a
               whole tensor; offset: in elements of the bucket's dtype, from the slice's start
    buckets    in the order they are sent: {"index", "dtype", "mode", "worker", "slice_numel", "slices"}, where slices
               are {"sender", "numel", "group", "contents"}, the last two by position

Slice s of a bucket lies at s * slice_numel of the flat bucket; its `numel` elements travel, nothing at all when 0.

    broadcast  one slice, from its sender to all workers
    slices     n slices: slice s goes to the workers s, s + n, s + 2n, … ; then those of each node all-gather in place
    direct     one slice, to `worker` alone
"""
from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Iterator, Mapping, Optional

import torch

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]
"""One (start, stop) a dimension of an HF tensor."""
Lattice = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Which elements of an HF tensor a block of numbers is: (start, shape, strides). The number at coordinates c of the
block is the element with row-major index start + Σ c·strides."""

MODES = ("broadcast", "slices", "direct")


def row_major(shape: Shape) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


@dataclass(frozen=True)
class Part:
    """A box of an HF tensor of shape `shape`, row-major over the box, `offset` elements into its slice.

    dtype: None, the bucket's; else the bucket's elements are bytes.
    """

    name: str
    shape: Shape
    box: Box
    offset: int
    dtype: Optional[str] = None

    @property
    def box_shape(self) -> Shape:
        return tuple(stop - start for start, stop in self.box)

    @property
    def numel(self) -> int:
        return prod(self.box_shape)

    @property
    def width(self) -> int:
        """Elements of the bucket that one of the part's takes."""
        return 1 if self.dtype is None else getattr(torch, self.dtype).itemsize

    @property
    def whole(self) -> bool:
        """Whether the box is the whole tensor."""
        return self.box_shape == self.shape

    def values(self, flat: torch.Tensor, offset: Optional[int] = None) -> torch.Tensor:
        """The part as a view, in the shape of its box, of what it lies in: a slice, or from `offset` on a bucket."""
        first = self.offset if offset is None else offset
        taken = flat[first:first + self.numel * self.width]
        return (taken if self.dtype is None else taken.view(getattr(torch, self.dtype))).view(self.box_shape)

    @property
    def lattice(self) -> Lattice:
        """The box's elements in their tensor."""
        strides = row_major(self.shape)
        return sum(start * stride for (start, _), stride in zip(self.box, strides)), self.box_shape, strides


@dataclass(frozen=True)
class Slice:
    """`numel` elements that sender `sender` sends at once."""

    sender: int
    numel: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Bucket:
    """One flat message of one dtype; see the top of this file."""

    index: int
    dtype: str
    mode: str
    worker: Optional[int]
    slice_numel: int
    slices: tuple[Slice, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype, None)

    @property
    def numel(self) -> int:
        """Elements of the flat bucket."""
        return len(self.slices) * self.slice_numel

    @property
    def nbytes(self) -> int:
        return self.numel * self.torch_dtype.itemsize

    @property
    def parts(self) -> Iterator[tuple[Part, int]]:
        """Every part, and where it begins in the flat bucket."""
        for position, one in enumerate(self.slices):
            for part in one.parts:
                yield part, position * self.slice_numel + part.offset


@dataclass(frozen=True)
class Plan:
    """One engine's share of a sync plan, or what one worker has to know of it. `digest` tells plans apart.

    ways: by HF name, in the order in which they are first sent, whether it goes "direct", as shards, or "shared"; and
    its dtype. buckets: of an engine, or those that reach the worker.
    """

    workers: int
    node: int
    senders: int
    tensors: Mapping[str, Shape]
    ways: Mapping[str, tuple[str, str]]
    buckets: tuple[Bucket, ...]
    digest: str

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any], worker: Optional[int] = None) -> Plan:
        """Read the wire form, with `worker` only that one's buckets in full.

        ValueError when it contradicts itself; KeyError, IndexError or TypeError when it is not one.
        """
        reader = _Reader(wire)
        buckets = tuple(bucket for entry in wire["buckets"]
                        if (bucket := reader.bucket(entry, worker is None or entry["worker"] in (None, worker))))
        digest = hashlib.sha256(json.dumps(wire, sort_keys=True).encode()).hexdigest()
        plan = cls(wire["workers"], wire["node"], wire["senders"], reader.shapes, reader.ways, buckets, digest)
        check(plan)
        return plan

    def of_worker(self, worker: int) -> tuple[Bucket, ...]:
        """The buckets that reach one worker, in order."""
        return tuple(bucket for bucket in self.buckets if bucket.worker in (None, worker))

    @property
    def tensor_kinds(self) -> dict[str, tuple[Shape, torch.dtype]]:
        """(shape, dtype) of every tensor, in the order in which they are first sent."""
        return {name: (self.tensors[name], getattr(torch, dtype)) for name, (_, dtype) in self.ways.items()}

    @property
    def direct(self) -> frozenset[str]:
        """Names of the tensors that go as shards, each to the worker that holds it."""
        return frozenset(name for name, (way, _) in self.ways.items() if way == "direct")

    @property
    def broadcasters(self) -> tuple[int, ...]:
        """The senders that have a communicator of their own with the workers, ascending."""
        return tuple(sorted({one.sender for bucket in self.buckets if bucket.mode == "broadcast"
                             for one in bucket.slices}))

    @property
    def point_to_point(self) -> bool:
        """Whether anything goes from one sender to one worker."""
        return bool(self.direct) or any(bucket.mode != "broadcast" for bucket in self.buckets)

    @property
    def gathers(self) -> bool:
        """Whether the workers of a node join slices."""
        return self.node > 1 and any(bucket.mode == "slices" for bucket in self.buckets)


class _Reader:
    """Reads buckets off the wire, and notes how every tensor goes."""

    def __init__(self, wire: Mapping[str, Any]):
        self.shapes = {name: tuple(shape) for name, shape in wire["tensors"].items()}
        self.ways: dict[str, tuple[str, str]] = {}
        self.groups: list[list[int]] = wire["groups"]
        self.contents: list[list] = wire["contents"]
        self.names = list(self.shapes)

    def bucket(self, entry: Mapping[str, Any], wanted: bool) -> Optional[Bucket]:
        """One bucket; None, and only its tensors' names are read, where it is not `wanted`."""
        way = "direct" if entry["mode"] == "direct" else "shared"
        for one in entry["slices"]:
            for place, _, _, *dtype in self.contents[one["contents"]]:
                name, kind = self._name(one["group"], place), (way, *(dtype or [entry["dtype"]]))
                if self.ways.setdefault(name, kind) != kind:
                    raise ValueError(f"{name} goes both as {self.ways[name]} and as {kind} in bucket {entry['index']}")
        if not wanted:
            return None
        slices = tuple(Slice(one["sender"], one["numel"], tuple(
            self._part(one["group"], *part) for part in self.contents[one["contents"]])) for one in entry["slices"])
        return Bucket(entry["index"], entry["dtype"], entry["mode"], entry["worker"], entry["slice_numel"], slices)

    def _name(self, group: int, place: int) -> str:
        return self.names[self.groups[group][place]]

    def _part(self, group: int, place: int, box: Optional[list], offset: int, dtype: Optional[str] = None) -> Part:
        name = self._name(group, place)
        shape = self.shapes[name]
        sides = ((0, size) for size in shape) if box is None else ((start, stop) for start, stop in box)
        return Part(name, shape, tuple(sides), offset, dtype)


def check(plan: Plan) -> None:
    """ValueError, with the place, when the plan contradicts itself; see the top of this file for what must hold."""
    if plan.node < 1 or plan.workers < 1 or plan.workers % plan.node:
        raise ValueError(f"{plan.workers} workers do not make up nodes of {plan.node}")
    indices = [bucket.index for bucket in plan.buckets]
    if not indices or indices != sorted(set(indices)):
        raise ValueError(f"the buckets' indices must rise and be there; they are {indices[:20]}")
    shared: dict[str, list[Part]] = {name: [] for name, (way, _) in plan.ways.items() if way == "shared"}
    for bucket in plan.buckets:
        _check_bucket(plan, bucket)
        for part, _ in bucket.parts if bucket.mode != "direct" else ():
            shared[part.name].append(part)
    for name, shape in plan.tensors.items():
        if name not in plan.ways:
            raise ValueError(f"{name} is in no bucket")
        if name in shared:
            _check_cover(name, shape, shared[name])


def _check_bucket(plan: Plan, bucket: Bucket) -> None:
    where = f"bucket {bucket.index}"
    slices = plan.node if bucket.mode == "slices" else 1
    if bucket.mode not in MODES or len(bucket.slices) != slices:
        raise ValueError(f"{where} has mode {bucket.mode!r} and {len(bucket.slices)} slices; modes are "
                         f"{', '.join(MODES)}, with one slice, or with {plan.node} in mode 'slices'")
    if not isinstance(bucket.torch_dtype, torch.dtype):
        raise ValueError(f"{where} has dtype {bucket.dtype!r}, which is none of torch's")
    direct = bucket.mode == "direct"
    if direct != (bucket.worker is not None) or direct and not 0 <= bucket.worker < plan.workers:
        raise ValueError(f"{where} of mode {bucket.mode!r} is for worker {bucket.worker}")
    for one in bucket.slices:
        if not 0 <= one.sender < plan.senders or not 0 <= one.numel <= bucket.slice_numel:
            raise ValueError(f"{where} has a slice of {one.numel} elements from sender {one.sender}; allowed are "
                             f"{bucket.slice_numel} elements and {plan.senders} senders")
        end = 0
        for part in one.parts:
            known = isinstance(getattr(torch, part.dtype or bucket.dtype, None), torch.dtype)
            if not known or part.dtype and bucket.dtype != "uint8":
                raise ValueError(f"{part.name} has dtype {part.dtype!r} in {where} of dtype {bucket.dtype!r}: it must "
                                 "be one of torch's, in a bucket of uint8")
            fits = len(part.box) == len(part.shape) and all(
                0 <= start < stop <= size for (start, stop), size in zip(part.box, part.shape))
            stop = part.offset + part.numel * part.width
            if not fits or part.offset < end or stop > one.numel or (part.offset | bucket.slice_numel) % part.width:
                raise ValueError(f"{part.name} of shape {list(part.shape)} does not fit its place in {where}: box "
                                 f"{part.box} at {part.offset}, where {end} … {one.numel} are free")
            end = stop


def _check_cover(name: str, shape: Shape, parts: list[Part]) -> None:
    """The boxes are the whole tensor, every element once."""
    twice = any(overlap(one.box, other.box) for i, one in enumerate(parts) for other in parts[:i])
    held = sum(part.numel for part in parts)
    if twice or held != prod(shape):
        raise ValueError(f"{name} of shape {list(shape)} is sent with {held} of {prod(shape)} elements"
                         f"{', some of them twice' if twice else ''}")


def overlap(one: Box, other: Box) -> bool:
    """Whether two boxes of a tensor share an element."""
    return all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other))


@dataclass(frozen=True)
class SyncRequest:
    """What one engine is told about one sync; one control call carries it.

    `link` names the set of communicators to use; with `connect` they are built first, at the store at
    store_host:store_port. `plan` is given to prepare a new link, before the sync's own call, and empty in that.
    `push` numbers the sync, and with `link` names its store keys. `deadline_s` is the time from the call to the commit.
    `after`: the push before it over this link, with which it is announced; None: it is not. `incarnation` is the server
    start the sender has in mind. `delta`: messages are those of `delta.py`; `base` is the
    push whose weights the engine must hold whole, for changes to be sent of them, None: everything comes whole.
    """

    run_id: str
    engine: int
    incarnation: int
    version: tuple[int, int]
    push: int
    link: str
    connect: bool
    store_host: str
    store_port: int
    plan: dict[str, Any]
    buffers: int
    transport: str
    verify: bool
    deadline_s: float
    delta: bool = False
    base: Optional[int] = None
    after: Optional[int] = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SyncRequest:
        fields = json.loads(text)
        return cls(**{**fields, "version": tuple(fields["version"])})


@dataclass(frozen=True)
class Holding:
    """Elements of one HF tensor that a worker holds, and their checksum (None outside verification)."""

    lattice: Lattice
    checksum: Optional[int] = None

    @property
    def numel(self) -> int:
        return prod(self.lattice[1])

    def to_wire(self) -> list:
        start, shape, strides = self.lattice
        return [start, list(shape), list(strides), self.checksum]

    @classmethod
    def from_wire(cls, wire: list) -> Holding:
        start, shape, strides, checksum = wire
        return cls((start, tuple(shape), tuple(strides)), checksum)


def ready_key(request: SyncRequest, worker: int) -> str:
    """Store key that worker `worker` sets when it stands ready to receive this sync."""
    return f"{request.link}/ready/{request.push}/{worker}"


def announced_key(link: str, after: int) -> str:
    """Store key under which rank 0 leaves the request of the sync that follows push `after` over a link, in JSON."""
    return f"{link}/after/{after}"


def sums_key(request: SyncRequest, sender: int) -> str:
    """Store key under which a sender leaves its checksums of a sync with `verify`, once it has sent everything.

    JSON: {"shared": {HF name: sum}, "direct": {worker: {HF name: sum}}}. A sum runs over all parts of the tensor that
    this sender sent to this engine (`shared`: in broadcast and slices buckets) or to that worker, each with
    `checksum(values, part.lattice)`. Sums of several senders add up (`checksum.add`).
    """
    return f"{request.link}/sums/{request.push}/{sender}"


BROADCAST, PEERS, NODE = "broadcast/{}", "peers", "node/{}"
"""Names of a link's communicators. One a broadcasting sender: it is rank 0, worker w is rank 1 + w. One for all that
goes from one sender to one worker: senders in order, then the workers. One a node, of its n workers alone."""
