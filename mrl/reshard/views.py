"""A slice as copies between tensors: pairs of views made once, for copies that are repeated every sync.

The stream code packs, gathers, assembles and sends without knowing any layout:

    every rank      srcs, dsts = pack_views(slice.shards[m], params, packed)     parameters       -> one flat buffer
    gather          packed buffers of `slice.ranks`                              -> `slice.sender`
    the sender      srcs, dsts = assemble_views(slice, gathered, flat)           gathered buffers -> the slice
    or, where `slice.ranks` is one rank alone, without a gather
                    srcs, dsts = direct_views(slice, params, flat)               parameters       -> the slice
    or, where its receiver reads the sender's memory
                    parts, values = in_place_views(slice, params, dtype)         the parameters as the slice

The views keep pointing at the same memory, so they stay valid as long as parameters and buffers are updated in place.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Iterator, Mapping, Sequence

from mrl.reshard.boxes import within
from mrl.reshard.buckets import Contribution, Part, Slice
from mrl.reshard.pieces import Piece

if TYPE_CHECKING:
    from torch import Tensor, dtype

Views = tuple[list["Tensor"], list["Tensor"]]
"""(sources, destinations), pairwise of equal shapes."""
MOST_BOXES = 256
"""Boxes in which a piece is read where it lies in its shard; a slice with a piece that takes more is gathered first."""


def pack_views(shard: Sequence[Contribution], params: Mapping[str, Tensor], packed: Tensor) -> Views:
    """From this rank's parameters into the first elements of `packed` (1-D).

    `params` maps Megatron names to local shards. ValueError for a shard whose shape is not the planned one, or that is
    of another dtype than `packed` (a router kept in float32, say): what leaves is what trains, bit for bit.
    """
    pairs = list(_pieces(shard, params, packed.dtype))
    return [source for _, source in pairs], _packed([piece for piece, _ in pairs], packed)


def assemble_views(one: Slice, gathered: Sequence[Tensor], flat: Tensor) -> Views:
    """From the packed buffers (`gathered[m]` as filled by rank `one.ranks[m]`) into the slice.

    The destinations cover elements 0 … `one.numel` of `flat` exactly once.
    """
    srcs, dsts, targets = [], [], _Targets(one, flat)
    for packed, shard in zip(gathered, one.shards, strict=True):
        pieces = [piece for given in shard for piece in given.pieces]
        srcs += _packed(pieces, packed)
        dsts += [targets.of(piece) for piece in pieces]
    return srcs, dsts


def direct_views(one: Slice, params: Mapping[str, Tensor], flat: Tensor) -> Views:
    """From the parameters of a slice's only rank into the slice. Arguments and errors as above."""
    (shard,), targets = one.shards, _Targets(one, flat)
    pairs = list(_pieces(shard, params, flat.dtype))
    return [source for _, source in pairs], [targets.of(piece) for piece, _ in pairs]


def in_place_views(one: Slice, params: Mapping[str, Tensor], held: dtype
                   ) -> tuple[list[Part], list[Tensor]] | None:
    """Boxes that are together the parts of a slice whose only rank holds all of it, and what it holds of each, as a
    view in the shape of the box. None where that would be too many. Errors as above; held: the parameters' dtype.
    """
    (shard,), parts, values, offset = one.shards, [], [], 0
    for given in shard:
        param = _param(given, params, held).detach()
        for piece in given.pieces:
            boxes = piece.boxes(param, MOST_BOXES)
            if boxes is None:
                return None
            for box, view in boxes:
                parts.append(Part(piece.hf, piece.hf_shape, box, offset))
                values.append(view)
                offset += view.numel()
    return parts, values


def _pieces(
    shard: Sequence[Contribution], params: Mapping[str, Tensor], held: dtype,
) -> Iterator[tuple[Piece, Tensor]]:
    """Every piece that a rank gives, with its view of the parameter."""
    for given in shard:
        param = _param(given, params, held)
        for piece in given.pieces:
            yield piece, piece.of_local(param)


def _param(given: Contribution, params: Mapping[str, Tensor], held: dtype) -> Tensor:
    param = params[given.param]
    if tuple(param.shape) != given.param_shape:
        raise ValueError(f"{given.param} has shape {tuple(param.shape)}, the plan says {given.param_shape}")
    if param.dtype != held:
        raise ValueError(f"{given.param} is {param.dtype}, its bucket {held}")
    return param


def _packed(pieces: Sequence[Piece], packed: Tensor) -> list[Tensor]:
    """The places of pieces that lie one behind the other."""
    places, offset = [], 0
    for piece in pieces:
        places.append(packed[offset:offset + piece.numel].view(piece.shape))
        offset += piece.numel
    return places


class _Targets:
    """The places of pieces among the parts of a slice."""

    def __init__(self, one: Slice, flat: Tensor):
        self.parts: dict[str, list[tuple[tuple, Tensor]]] = {}
        for part in one.parts:
            box = flat[part.offset:part.offset + part.numel].view(part.box_shape)
            self.parts.setdefault(part.name, []).append((part.box, box))

    def of(self, piece: Piece) -> Tensor:
        """The view of the slice that a piece fills."""
        box, tensor = next(part for part in self.parts[piece.hf] if within(piece.hf_index, part[0]))
        inside = tuple(slice(low - first, high - first) for (low, high), (first, _) in zip(piece.hf_index, box))
        return piece.shaped(tensor[inside])
