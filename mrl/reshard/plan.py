"""The plan of a weight sync: which parameters are gathered together, and where every HF tensor lies in its bucket.

Pure: it depends on its arguments alone, needs no torch to be made, and is the same on every rank. `views.py` turns
its buckets into copies between tensors.
"""
from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any, Iterator, Mapping

from mrl.reshard.layout import Layout
from mrl.reshard.params import Column, ParamPlan, exported_params, hf_shapes
from mrl.reshard.pieces import Shape
from mrl.reshard.spec import ModelSpec

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class BucketItem:
    """One HF tensor inside a flat bucket: elements offset … offset + numel, row-major."""

    name: str
    shape: Shape
    dtype: str
    offset: int
    numel: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """One flat message: whole HF tensors of one dtype, all from pipeline stage `stage`.

    `shards[m]` are the parameters that the stage's m-th rank contributes, with its pieces: the same names, in the same
    order and of the same local shapes for every m. Experts are gathered from the stage's first ep * etp ranks, all else
    from its first tp ranks: the two share a bucket only where that is the same. One read back from the wire has none.
    """

    index: int
    stage: int
    dtype: str
    numel: int
    items: tuple[BucketItem, ...]
    shards: tuple[tuple[ParamPlan, ...], ...] = ()

    @property
    def params(self) -> tuple[str, ...]:
        """Megatron names gathered for this bucket, in order (names of stage `stage`)."""
        return tuple(param.name for param in self.shards[0])

    @property
    def local_numel(self) -> int:
        """Elements one rank contributes to the gather, padding included."""
        return sum(param.numel for param in self.shards[0])

    @property
    def nbytes(self) -> int:
        """Bytes of the flat message."""
        return self.numel * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """All buckets of one sync, in the order they are sent."""

    buckets: tuple[Bucket, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes one engine worker receives in one sync."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def max_bucket_numel(self) -> int:
        """Elements of the largest flat message."""
        return max(bucket.numel for bucket in self.buckets)

    @property
    def max_local_numel(self) -> int:
        """Elements of the largest contribution of one rank to a gather."""
        return max(bucket.local_numel for bucket in self.buckets)

    def to_wire(self) -> dict[str, Any]:
        """What a receiver needs, as plain JSON types: the buckets with name, shape, dtype and place of every item."""
        return {"buckets": [
            {
                "index": bucket.index, "stage": bucket.stage, "dtype": bucket.dtype, "numel": bucket.numel,
                "items": [
                    {"name": item.name, "shape": list(item.shape), "dtype": item.dtype,
                     "offset": item.offset, "numel": item.numel}
                    for item in bucket.items
                ],
            }
            for bucket in self.buckets
        ]}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> SyncPlan:
        """The receiver's view of a plan: `to_wire()` read back; its buckets have no shards."""
        return cls(tuple(
            Bucket(**{**bucket, "items": tuple(
                BucketItem(**{**item, "shape": tuple(item["shape"])}) for item in bucket["items"]
            )})
            for bucket in wire["buckets"]
        ))


def plan_sync(spec: ModelSpec, layout: Layout, bucket_bytes: int, dtype: str, te: bool) -> SyncPlan:
    """Packs every stage's parameters, in order, experts' last, into buckets of at most `bucket_bytes`.

    The HF tensors of one Megatron parameter stay together; a parameter larger than a bucket gets one of its own. Tied
    copies and vocabulary padding are not in it. `dtype`: name of the dtype the weights leave in. `te`: see
    `local_params`. ValueError for an unknown dtype, a bucket size below 1 and an impossible layout.
    """
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype {dtype!r} cannot be synced; known are {', '.join(DTYPE_BYTES)}")
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes is {bucket_bytes}, but must be at least 1")
    limit = bucket_bytes // DTYPE_BYTES[dtype]
    buckets: list[Bucket] = []
    for stage in range(layout.pp):
        for columns in _groups(exported_params(spec, layout, stage, te), limit):
            buckets.append(_bucket(len(buckets), stage, dtype, columns))
    return SyncPlan(tuple(buckets))


def _groups(columns: Iterator[Column], limit: int) -> Iterator[list[Column]]:
    """Consecutive parameters of the same ranks and dtype, of at most `limit` elements together (or one that alone has
    more). Parameters that are parts of the same HF tensors are one."""
    group: list[Column] = []
    filled = 0
    for _, same in groupby(columns, key=lambda column: tuple(hf_shapes(column))):
        whole = list(same)
        numel = sum(prod(shape) for shape in hf_shapes(whole[0]).values())
        if group and (filled + numel > limit or _ranks_and_dtype(whole[0]) != _ranks_and_dtype(group[0])):
            yield group
            group, filled = [], 0
        group += whole
        filled += numel
    if group:
        yield group


def _ranks_and_dtype(column: Column) -> tuple[int, str | None]:
    return len(column), column[0].dtype


def _bucket(index: int, stage: int, dtype: str, columns: list[Column]) -> Bucket:
    dtype = columns[0][0].dtype or dtype
    shapes = {name: shape for column in columns for name, shape in hf_shapes(column).items()}
    items, offset = [], 0
    for name, shape in shapes.items():
        items.append(BucketItem(name, shape, dtype, offset, prod(shape)))
        offset += prod(shape)
    return Bucket(index, stage, dtype, offset, tuple(items), tuple(zip(*columns)))
