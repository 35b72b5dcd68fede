"""The words of a sync, as both ends speak them: plan, request, holdings, store keys. Everything is JSON on the way.

A version is a pair [attempt, step]. The wire form of a plan, which is one engine's share of it, holds

    workers    number of the engine's workers W
    node       workers on one engine node n; W is a multiple of it
    senders    number of trainer ranks that send to this engine; below they are named by their position in that order
    tensors    {HF name: [shape]} of every tensor
    buckets    in the order they are sent: {"index", "dtype", "mode", "worker", "slice_numel", "slices"}, where slices
               are {"sender", "numel", "parts"} and parts are [name, box, offset]; box: [[start, stop] a dimension],
               null for a whole tensor; offset: in elements, from the start of the slice

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
    """A box of an HF tensor of shape `shape`, row-major over the box, `offset` elements into its slice."""

    name: str
    shape: Shape
    box: Box
    offset: int

    @property
    def box_shape(self) -> Shape:
        return tuple(stop - start for start, stop in self.box)

    @property
    def numel(self) -> int:
        return prod(self.box_shape)

    @property
    def whole(self) -> bool:
        """Whether the box is the whole tensor."""
        return self.box_shape == self.shape

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
    """One engine's share of a sync plan. `digest` tells plans apart."""

    workers: int
    node: int
    senders: int
    tensors: Mapping[str, Shape]
    buckets: tuple[Bucket, ...]
    digest: str

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Plan:
        """Read the wire form. ValueError when it contradicts itself; KeyError or TypeError when it is not one."""
        shapes = {name: tuple(shape) for name, shape in wire["tensors"].items()}
        buckets = tuple(_read_bucket(entry, shapes) for entry in wire["buckets"])
        digest = hashlib.sha256(json.dumps(wire, sort_keys=True).encode()).hexdigest()
        plan = cls(wire["workers"], wire["node"], wire["senders"], shapes, buckets, digest)
        check(plan)
        return plan

    def of_worker(self, worker: int) -> tuple[Bucket, ...]:
        """The buckets that reach one worker, in order."""
        return tuple(bucket for bucket in self.buckets if bucket.worker in (None, worker))

    @property
    def tensor_kinds(self) -> dict[str, tuple[Shape, torch.dtype]]:
        """(shape, dtype) of every tensor, in the order in which they are first sent."""
        return {part.name: (part.shape, bucket.torch_dtype) for bucket in self.buckets for part, _ in bucket.parts}

    @property
    def direct(self) -> frozenset[str]:
        """Names of the tensors that go as shards, each to the worker that holds it."""
        return frozenset(part.name for bucket in self.buckets if bucket.mode == "direct" for part, _ in bucket.parts)

    @property
    def broadcasters(self) -> tuple[int, ...]:
        """The senders that have a communicator of their own with the workers, ascending."""
        return tuple(sorted({one.sender for bucket in self.buckets if bucket.mode == "broadcast"
                             for one in bucket.slices}))

    @property
    def point_to_point(self) -> bool:
        """Whether anything goes from one sender to one worker."""
        return any(bucket.mode != "broadcast" for bucket in self.buckets)

    @property
    def gathers(self) -> bool:
        """Whether the workers of a node join slices."""
        return self.node > 1 and any(bucket.mode == "slices" for bucket in self.buckets)


def _read_bucket(entry: Mapping[str, Any], shapes: Mapping[str, Shape]) -> Bucket:
    def read_part(name: str, box: Optional[list], offset: int) -> Part:
        if name not in shapes:
            raise ValueError(f"{name} in bucket {entry['index']} is not among the plan's tensors")
        whole = tuple((0, size) for size in shapes[name])
        return Part(name, shapes[name], whole if box is None else tuple((start, stop) for start, stop in box), offset)

    slices = tuple(Slice(one["sender"], one["numel"], tuple(read_part(*part) for part in one["parts"]))
                   for one in entry["slices"])
    return Bucket(entry["index"], entry["dtype"], entry["mode"], entry["worker"], entry["slice_numel"], slices)



def check(plan: Plan) -> None:
    """ValueError, with the place, when the plan contradicts itself; see the top of this file for what must hold."""
    if plan.node < 1 or plan.workers < 1 or plan.workers % plan.node:
        raise ValueError(f"{plan.workers} workers do not make up nodes of {plan.node}")
    indices = [bucket.index for bucket in plan.buckets]
    if not indices or indices != sorted(set(indices)):
        raise ValueError(f"the buckets' indices must rise and be there; they are {indices[:20]}")
    found: dict[str, tuple[str, str]] = {}
    shared: dict[str, list[Part]] = {name: [] for name in plan.tensors}
    for bucket in plan.buckets:
        _check_bucket(plan, bucket)
        way = ("direct" if bucket.mode == "direct" else "shared", bucket.dtype)
        for part, _ in bucket.parts:
            if found.setdefault(part.name, way) != way:
                raise ValueError(f"{part.name} goes both as {found[part.name]} and as {way} in bucket {bucket.index}")
            if bucket.mode != "direct":
                shared[part.name].append(part)
    for name, shape in plan.tensors.items():
        if name not in found:
            raise ValueError(f"{name} is in no bucket")
        if found[name][0] == "shared":
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
            fits = len(part.box) == len(part.shape) and all(
                0 <= start < stop <= size for (start, stop), size in zip(part.box, part.shape))
            if not fits or part.offset < end or part.offset + part.numel > one.numel:
                raise ValueError(f"{part.name} of shape {list(part.shape)} does not fit its place in {where}: box "
                                 f"{part.box} at {part.offset}, where {end} … {one.numel} are free")
            end = part.offset + part.numel


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
    `incarnation` is the server start the sender has in mind.
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
