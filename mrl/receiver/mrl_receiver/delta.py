"""What has changed in a slice since it was last sent, packed without loss: both ends' view of a message.

A message is a header, `HEADER` numbers of int64, and then a payload of as many bytes as the header says, none at all
when it says 0. The payload is the slice itself (WHOLE), or where it has changed, padded to 8 bytes, and the new values
there, in order:

    GAPS_1, _2, _4   the distance from each changed element to the next, less one, in 1, 2 or 4 bytes. A distance that
                     is too long for its bytes is broken by elements that have not changed
    BITMAP           one bit an element, lowest first

Elements are compared as integers of their size, so that any NaN and both zeros keep their bits. All work is a few calls
a slice, on the device where the slice lies.
"""
from __future__ import annotations

from typing import Iterator, NamedTuple, Optional

import torch

HEADER = 3
WHOLE, GAPS_1, GAPS_2, GAPS_4, BITMAP = range(5)
CHUNK_ELEMENTS = 1 << 24
"""Of a slice that are worked on at once where the work takes several bytes an element."""

_GAPS = {GAPS_1: torch.uint8, GAPS_2: torch.int16, GAPS_4: torch.int32}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ALIGNMENT = 8


class Header(NamedTuple):
    """`entries`: the values in the payload of a delta, changed or not; 0 with WHOLE. `nbytes`: of the payload."""

    kind: int
    entries: int
    nbytes: int

    @classmethod
    def read(cls, numbers: torch.Tensor, numel: int, itemsize: int) -> Header:
        """From i64[HEADER], for a slice of `numel` elements. ValueError when it cannot be one."""
        header = cls(*numbers.tolist())
        kinds = {WHOLE: numel * itemsize, **{kind: _payload(kind, header.entries, numel, itemsize)
                                             for kind in (*_GAPS, BITMAP)}}
        if kinds.get(header.kind) != header.nbytes or not 0 <= header.entries <= numel or header.nbytes > kinds[WHOLE]:
            raise ValueError(f"a message with header {tuple(header)} is no slice of {numel} elements of {itemsize} "
                             "bytes")
        return header


def whole(flat: torch.Tensor) -> Header:
    """The header of a slice that is sent as it is."""
    return Header(WHOLE, 0, flat.nbytes)


def pack(new: torch.Tensor, old: torch.Tensor) -> Optional[tuple[Header, torch.Tensor]]:
    """The smallest message that makes `new` from `old`, its payload as u8; None when nothing is smaller than `new`.

    Both are flat, of one dtype and length. Takes memory beside the payload: a byte an element, and at most five more
    when many have changed.
    """
    numel, itemsize = new.numel(), new.itemsize
    new, old = new.view(_BITS[itemsize]), old.view(_BITS[itemsize])
    changed = new != old
    count = int(changed.count_nonzero())
    if not count:
        return Header(BITMAP, 0, 0), new.new_empty(0, dtype=torch.uint8)
    sizes = {BITMAP: (count, _payload(BITMAP, count, numel, itemsize))}
    gaps = torch.empty(0)
    if count < numel // 8 and numel <= torch.iinfo(torch.int32).max:  # with more, a bitmap is shorter
        found = changed.nonzero().view(-1)
        gaps = found.diff(prepend=found.new_full((1,), -1)) - 1
        for kind, dtype in _GAPS.items():
            entries = count + int((gaps // _limit(dtype)).sum())
            sizes[kind] = (entries, _payload(kind, entries, numel, itemsize))
    kind = min(sizes, key=lambda one: sizes[one][1])
    header = Header(kind, *sizes[kind])
    if header.nbytes >= numel * itemsize:
        return None
    payload = new.new_zeros(header.nbytes, dtype=torch.uint8)
    where, values = _split(header, payload, numel, new.dtype)
    if kind == BITMAP:
        _write_bits(changed, where)
        torch.cat([part[mask] for part, mask in zip(_chunks(new), _chunks(changed))], out=values)
    else:
        where.copy_(_broken(gaps, _limit(where.dtype)))
        torch.index_select(new, 0, _indices(where), out=values)
    return header, payload


def unpack(header: Header, payload: torch.Tensor, flat: torch.Tensor) -> None:
    """Make the new slice from the old one in `flat`. payload: u8, and aligned to 8 bytes. ValueError when it is broken,
    perhaps half way."""
    if not header.entries:
        return
    numel, flat = flat.numel(), flat.view(_BITS[flat.itemsize])
    where, values = _split(header, payload, numel, flat.dtype)
    if header.kind == BITMAP:
        changed = _read_bits(where, numel)
        if int(changed.count_nonzero()) != header.entries:
            raise ValueError(f"a message says that {header.entries} elements have changed, and marks others")
        taken = 0
        for part, mask in zip(_chunks(flat), _chunks(changed)):
            count = int(mask.count_nonzero())
            part[mask] = values[taken:taken + count]
            taken += count
        return
    indices = _indices(where)
    if int(indices[-1]) >= numel:  # they rise
        raise ValueError(f"a message says that element {int(indices[-1])} of {numel} has changed")
    flat.index_copy_(0, indices, values)


def _payload(kind: int, entries: int, numel: int, itemsize: int) -> int:
    """Bytes of a delta's payload."""
    return _aligned(_where_bytes(kind, entries, numel)) + entries * itemsize if entries else 0


def _where_bytes(kind: int, entries: int, numel: int) -> int:
    return -(-numel // 8) if kind == BITMAP else entries * _GAPS[kind].itemsize


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _split(header: Header, payload: torch.Tensor, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the two parts of a payload: where, and what."""
    end = _where_bytes(header.kind, header.entries, numel)
    where = payload[:end]
    if header.kind != BITMAP:
        where = where.view(_GAPS[header.kind])
    return where, payload[_aligned(end):].view(dtype)


def _limit(dtype: torch.dtype) -> int:
    """Distances that fit into a gap."""
    return 1 << 8 * dtype.itemsize


def _broken(gaps: torch.Tensor, limit: int) -> torch.Tensor:
    """Distances, less one, all below `limit`, which end at the same elements and at more of them."""
    breaks = gaps // limit
    given = torch.arange(len(gaps), device=gaps.device) + breaks.cumsum(0)
    broken = gaps.new_full((len(gaps) + int(breaks.sum()),), limit - 1)
    broken[given] = gaps % limit
    return broken


def _indices(gaps: torch.Tensor) -> torch.Tensor:
    """Indices of the elements, from the distances between them as they travel."""
    distances = gaps.to(torch.int64).bitwise_and_(_limit(gaps.dtype) - 1)  # read as unsigned
    return distances.add_(1).cumsum_(0).sub_(1)


def _write_bits(mask: torch.Tensor, bits: torch.Tensor) -> None:
    for place in range(8):
        some = mask[place::8].to(torch.uint8)
        bits[:len(some)] |= some << place


def _read_bits(bits: torch.Tensor, numel: int) -> torch.Tensor:
    mask = torch.empty(8 * len(bits), dtype=torch.bool, device=bits.device)
    for place in range(8):
        mask[place::8] = (bits >> place) & 1
    return mask[:numel]


def _chunks(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    yield from flat.split(CHUNK_ELEMENTS)
