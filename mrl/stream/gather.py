"""Filling slices from the trainer ranks that hold them.

Every rank of a slice packs its own pieces into one flat buffer and passes that to the slice's sender, which puts all of
them, and its own straight from its parameters, into a slot of its ring. Each of these is one call per slice, over views
made once.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Iterator, Mapping, Optional, Sequence

import torch
import torch.distributed as dist

from mrl.receiver.mrl_receiver.copies import Copies
from mrl.receiver.mrl_receiver.in_place import InPlace
from mrl.receiver.mrl_receiver.links import finish_stream
from mrl.receiver.mrl_receiver.wire import Part
from mrl.reshard.buckets import Bucket, Contribution, Slice
from mrl.reshard.buckets import Part as BucketPart
from mrl.reshard.fp8 import sent_parts
from mrl.reshard.plan import SyncPlan
from mrl.reshard.views import assemble_views, direct_views, in_place_views, pack_views
from mrl.stream.links import Workers
from mrl.stream.quantise import quantise


@dataclass(frozen=True)
class Share:
    """What one rank does for one slice.

    key: which slice of which bucket of the plan. engines: whom the slice is for, and `workers` which workers of each.
    messages: packed pieces that this rank sends or, as the slice's sender, receives. quantised: (weights, e4m3,
    scales) of every part, where the sender quantises. content: on the sender alone, the finished slice, in its slot of
    the ring or where the parameters have it; `parts` are those of that.
    """

    key: tuple[int, int]
    engines: tuple[int, ...]
    workers: Workers
    direct: bool
    parts: tuple[Part, ...]
    pack: Copies
    messages: tuple[dist.P2POp, ...]
    assemble: Copies
    quantised: tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...]
    content: Optional[torch.Tensor | InPlace]

    @property
    def values(self) -> Iterator[tuple[Part, torch.Tensor]]:
        """The parts of the finished slice, and what they hold."""
        if isinstance(self.content, InPlace):
            return zip(self.parts, self.content.values, strict=True)
        return ((part, part.values(self.content)) for part in self.parts)


class Gatherer:
    """One rank's shares of all slices that go to `engines`, in plan order, and the memory that they pass through.

    params: this rank's shards by Megatron name, updated in place by training. buffers: finished slices that a sender
    holds at a time; the i-th that it sends lies in slot i mod `buffers`. Beside that ring a rank has room for its own
    pieces of one slice, if it passes any on, for the other ranks' pieces of one slice, if it gathers any, and for one
    slice, if it quantises any. lends: what the sender has by itself is not gathered, but lent where it lies.
    """

    def __init__(self, plan: SyncPlan, rank: int, params: Mapping[str, torch.Tensor], engines: frozenset[int],
                 buffers: int, lends: bool = False):
        self.rank, self.params, self.engines, self.buffers, self.lends = rank, params, engines, buffers, lends
        self.device = next(iter(params.values())).device
        self.places = _places(params)
        mine = [_Place(bucket, position, rank) for bucket in plan.of_rank(rank) if engines & set(bucket.engines)
                for position, one in enumerate(bucket.slices) if rank in one.ranks and one.numel]
        self.packed = self._room(max((place.packed_bytes for place in mine), default=0))
        self.gathered = self._room(max((place.gathered_bytes for place in mine), default=0))
        self.weights = self._room(max((place.weights_bytes for place in mine), default=0))
        lent = [self._in_place(place) if lends else None for place in mine]
        slot = max((place.slot_bytes for place, held in zip(mine, lent) if held is None), default=0)
        self.ring = [self._room(slot) for _ in range(buffers)] if slot else []
        self.shares: list[Share] = []
        self.sends: list[Share] = []
        for place, held in zip(mine, lent):
            self.shares.append(self._share(place, plan.engine_layout.world, held))
            if place.sends:
                self.sends.append(self.shares[-1])

    @property
    def nbytes(self) -> int:
        """Memory beside the parameters."""
        return sum(room.nbytes for room in (self.packed, self.gathered, self.weights, *self.ring))

    def current(self, params: Mapping[str, torch.Tensor], engines: frozenset[int]) -> bool:
        """Whether the views are for these engines and still of the storage of `params`, wherever its memory is now."""
        return self.engines == engines and self.places == _places(params)

    @torch.no_grad()
    def fill(self, share: Share) -> None:
        """Gather one slice, together with the other ranks that have a share in it. The sender's slot must be free."""
        share.pack.run()
        if share.messages:
            for work in dist.batch_isend_irecv([*share.messages]):
                work.wait()
        share.assemble.run()
        for weights, values, scales in share.quantised:
            quantise(weights, values, scales)
        if share.content is not None:
            finish_stream(self.device)  # another thread sends it

    def _room(self, nbytes: int) -> torch.Tensor:
        return torch.empty(-(-nbytes // 16) * 16, dtype=torch.uint8, device=self.device)  # a multiple of every dtype

    def _in_place(self, place: _Place) -> Optional[InPlace]:
        """The slice where it lies; None where it has to be gathered or quantised."""
        if place.bucket.fp8 or place.slice.ranks != (self.rank,):
            return None
        found = in_place_views(place.slice, self.params, place.dtype)
        return found and InPlace(_receivers(found[0]), found[1])

    def _share(self, place: _Place, workers: int, lent: Optional[InPlace]) -> Share:
        bucket, one = place.bucket, place.slice
        own = one.shards[place.member]
        pack, messages, assemble, content, quantised = ([], []), [], ([], []), lent, ()
        parts = _receivers(sent_parts(one.parts) if bucket.fp8 else one.parts)
        if lent is not None:
            parts = tuple(lent.parts)
        elif place.sends:
            content = weights = self.ring[len(self.sends) % len(self.ring)].view(place.sent_dtype)[:one.sent]
            if bucket.fp8:
                weights = self.weights.view(place.dtype)[:one.numel]
                quantised = _quantised(_receivers(one.parts), weights, parts, content)
            pack = direct_views(replace(one, shards=(own,)), self.params, weights)
            room = self.gathered.view(place.dtype)[:sum(place.others.values())]
            gathered = room.split([*place.others.values()]) if place.others else ()
            assemble = assemble_views(replace(one, shards=tuple(one.shards[other] for other in place.others)),
                                      gathered, weights)
            messages = [dist.P2POp(dist.irecv, packed, one.ranks[other])
                        for other, packed in zip(place.others, gathered)]
        else:
            packed = self.packed.view(place.dtype)[:_numel(own)]
            pack = pack_views(own, self.params, packed)
            messages = [dist.P2POp(dist.isend, packed, one.sender)] if packed.numel() else []
        return Share((bucket.index, place.position), bucket.engines, _workers(bucket, place.position, workers),
                     bucket.mode == "direct", parts, Copies(zip(*pack)), tuple(messages), Copies(zip(*assemble)),
                     quantised, content)


@dataclass(frozen=True)
class _Place:
    """A slice that a rank has a share in, and the bytes of memory that it needs for it."""

    bucket: Bucket
    position: int
    rank: int

    @property
    def slice(self) -> Slice:
        return self.bucket.slices[self.position]

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.bucket.held)

    @property
    def sent_dtype(self) -> torch.dtype:
        return getattr(torch, self.bucket.dtype)

    @property
    def sends(self) -> bool:
        return self.rank == self.slice.sender

    @property
    def member(self) -> int:
        """The rank's number within the slice's ranks."""
        return self.slice.ranks.index(self.rank)

    @property
    def others(self) -> dict[int, int]:
        """Elements that the slice's other members give, if any."""
        numels = {member: _numel(shard) for member, shard in enumerate(self.slice.shards) if member != self.member}
        return {member: numel for member, numel in numels.items() if numel}

    @property
    def slot_bytes(self) -> int:
        return self.slice.sent * self.sent_dtype.itemsize if self.sends else 0

    @property
    def weights_bytes(self) -> int:
        return self.slice.numel * self.dtype.itemsize if self.sends and self.bucket.fp8 else 0

    @property
    def gathered_bytes(self) -> int:
        return sum(self.others.values()) * self.dtype.itemsize if self.sends else 0

    @property
    def packed_bytes(self) -> int:
        return 0 if self.sends else _numel(self.slice.shards[self.member]) * self.dtype.itemsize


def _numel(shard: Sequence[Contribution]) -> int:
    return sum(given.numel for given in shard)


def _workers(bucket: Bucket, position: int, workers: int) -> Workers:
    """Which of an engine's workers the slice at `position` of the bucket goes to."""
    if bucket.mode == "broadcast":
        return None
    if bucket.mode == "direct":
        return (bucket.worker,)
    return tuple(range(position, workers, len(bucket.slices)))


def _receivers(parts: Sequence[BucketPart]) -> tuple[Part, ...]:
    """Parts of a plan, as the receiver knows them."""
    return tuple(Part(part.name, part.shape, part.box, part.offset, part.dtype) for part in parts)


def _quantised(parts: Sequence[Part], weights: torch.Tensor, sent: Sequence[Part], flat: torch.Tensor
               ) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...]:
    """Views of every part before and after it is quantised."""
    values, scales = sent[:len(parts)], sent[len(parts):]
    return tuple((part.values(weights), one.values(flat), other.values(flat))
                 for part, one, other in zip(parts, values, scales, strict=True))


def _places(params: Mapping[str, torch.Tensor]) -> list[tuple[str, int, int]]:
    """By name, the storage and where in it. Views keep their storage alive, so no other can have its number."""
    return [(name, tensor.untyped_storage()._cdata, tensor.storage_offset()) for name, tensor in params.items()]
