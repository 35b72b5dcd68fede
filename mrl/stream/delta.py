"""The slices that a sender sent last, and the messages that say what has changed in them since.

A delta is only for engines that hold what the slice was when it was last sent. Which push an engine holds is told by
its request, and which one a slice was last sent in is noted with it: only if the two are the same push for every engine
that the slice goes to now, the message is a delta. Otherwise all of them get it whole.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Collection, Optional

import torch

from mrl.receiver.mrl_receiver.delta import HEADER, Header, pack, whole
from mrl.stream.gather import Share


@dataclass
class _Last:
    push: int
    flat: torch.Tensor


class Bases:
    """One sender's, as long as its plan lasts. Takes as much memory as all slices that it sends, where they are.

    slots: of the ring that slices are filled in; a slot's header is written again when the slot is. sent: by slice,
    what it was when it was last sent, and in which push.
    """

    def __init__(self, slots: int, device: torch.device):
        self.headers = [torch.empty(HEADER, dtype=torch.int64, device=device) for _ in range(slots)]
        self.sent: dict[tuple[int, int], _Last] = {}

    @property
    def nbytes(self) -> int:
        """Memory of what is kept."""
        return sum(sent.flat.nbytes for sent in self.sent.values())

    def message(self, number: int, share: Share, push: int, held: Collection[Optional[int]]
                ) -> tuple[torch.Tensor, torch.Tensor]:
        """Header (i64[HEADER]) and payload of this rank's slice `number` of push `push`; the slice is remembered.

        held: the pushes that the engines which it goes to hold. A delta's payload lies where the slice was.
        """
        delta: Optional[tuple[Header, torch.Tensor]] = None
        if share.key in self.sent:
            before = self.sent[share.key]
            if set(held) == {before.push}:
                delta = pack(share.content, before.flat)
            before.flat.copy_(share.content)
            before.push = push
        else:
            self.sent[share.key] = _Last(push, share.content.clone())
        header, payload = whole(share.content), share.content
        if delta is not None:
            header, payload = delta[0], share.content.view(torch.uint8)[:delta[0].nbytes].copy_(delta[1])
        numbers = self.headers[number % len(self.headers)]
        return numbers.copy_(torch.tensor(header)), payload
