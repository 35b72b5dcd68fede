"""The words of a sync, as both ends speak them: plan, request, reply. Everything is JSON on the way.

A version is a pair [attempt, step]. The plan's form is `SyncPlan.to_wire()` of `mrl.reshard`.
"""
from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Mapping, Optional

import torch

Lattice = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Which elements of an HF tensor a block of numbers is: (start, shape, strides). The number at coordinates c of the
block is the element with row-major index start + Σ c·strides."""


@dataclass(frozen=True)
class Item:
    """One HF tensor inside a bucket: elements offset … offset + numel, row-major."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    numel: int


@dataclass(frozen=True)
class Bucket:
    """One flat message of `numel` elements of one dtype, sent by pipeline stage `stage`."""

    index: int
    stage: int
    dtype: str
    numel: int
    items: tuple[Item, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def nbytes(self) -> int:
        return self.numel * self.torch_dtype.itemsize

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The items as views of `flat` (1-D, at least numel elements), by name."""
        return {item.name: flat[item.offset:item.offset + item.numel].view(item.shape) for item in self.items}


@dataclass(frozen=True)
class Plan:
    """All buckets, in the order they are sent. `digest` tells plans apart."""

    buckets: tuple[Bucket, ...]
    digest: str

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> "Plan":
        """Read `SyncPlan.to_wire()`. ValueError when an item lies outside its bucket or a name occurs twice."""
        buckets = tuple(
            Bucket(entry["index"], entry["stage"], entry["dtype"], entry["numel"],
                   tuple(Item(item["name"], tuple(item["shape"]), item["dtype"], item["offset"], item["numel"])
                         for item in entry["items"]))
            for entry in wire["buckets"])
        seen: set[str] = set()
        for bucket in buckets:
            for item in bucket.items:
                if item.name in seen:
                    raise ValueError(f"{item.name} occurs twice in the plan")
                seen.add(item.name)
                if item.offset + item.numel > bucket.numel or item.numel != torch.Size(item.shape).numel():
                    raise ValueError(f"{item.name} of shape {item.shape} does not fit its place in bucket "
                                     f"{bucket.index}: {item.numel} elements at {item.offset} of {bucket.numel}")
        digest = hashlib.sha256(json.dumps(wire, sort_keys=True).encode()).hexdigest()
        return cls(buckets, digest)

    @property
    def stages(self) -> list[int]:
        """Pipeline stages that send something, ascending."""
        return sorted({bucket.stage for bucket in self.buckets})

    @property
    def max_bytes(self) -> int:
        """Bytes of the largest bucket."""
        return max(bucket.nbytes for bucket in self.buckets)

    @property
    def items(self) -> dict[str, Item]:
        """Every HF tensor of the plan, by name."""
        return {item.name: item for bucket in self.buckets for item in bucket.items}


@dataclass(frozen=True)
class SyncRequest:
    """What one engine is told about one sync; one control call carries it.

    `link` names the set of communicators to use; with `connect` they are built first, at the store at
    store_host:store_port, and `plan` is given. `push` numbers the sync, and with `link` names its store keys.
    `deadline_s` is the time from the call to the commit. `incarnation` is the server start the sender has in mind.
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
    def from_json(cls, text: str) -> "SyncRequest":
        fields = json.loads(text)
        return cls(**{**fields, "version": tuple(fields["version"])})


@dataclass(frozen=True)
class Holding:
    """Elements of one HF tensor that a worker holds, and their checksum (None outside verification)."""

    lattice: Lattice
    checksum: Optional[int] = None

    @property
    def numel(self) -> int:
        return torch.Size(self.lattice[1]).numel()

    def to_wire(self) -> list:
        start, shape, strides = self.lattice
        return [start, list(shape), list(strides), self.checksum]

    @classmethod
    def from_wire(cls, wire: list) -> "Holding":
        start, shape, strides, checksum = wire
        return cls((start, tuple(shape), tuple(strides)), checksum)


def ready_key(request: SyncRequest, worker: int) -> str:
    """Store key that worker `worker` sets when it stands ready to receive this sync."""
    return f"{request.link}/ready/{request.push}/{worker}"
