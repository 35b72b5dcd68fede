"""A transport that makes use after release visible: what may be written again is overwritten at once."""
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Optional

import torch

from mrl.receiver.mrl_receiver.in_place import InPlace
from mrl.receiver.mrl_receiver.links import Borrowing, Label, Lent, Pending, Transport
from mrl.receiver.mrl_receiver import transports

GARBAGE = 0xFF
"""Of every byte: NaN in all floating-point types, -1 in integers."""


def poison(flat: torch.Tensor) -> None:
    flat.view(torch.uint8).fill_(GARBAGE)


class PoisonTransport:
    """Sender: a buffer turns to garbage when the last transfer out of it that has begun is acknowledged, over
    whichever transport of the same `ledger`; begin all transfers of a buffer before the first is waited for.
    Receiver: a buffer turns to garbage when it is given back to be received into, or to the sender that lent it.
    """

    def __init__(self, inner: Transport, ledger: Counter, rank: int, world_size: int):
        self.inner, self.ledger, self.rank, self.world_size = inner, ledger, rank, world_size

    def broadcast(self, flat: torch.Tensor, deadline: float, label: Optional[Label] = None) -> Pending:
        if self.rank == 0:
            return self._poisoning(self.inner.broadcast(flat, deadline, label), flat)
        poison(flat)
        return self.inner.broadcast(flat, deadline)

    def send(self, flat: torch.Tensor, peer: int, deadline: float, label: Optional[Label] = None) -> Pending:
        return self._poisoning(self.inner.send(flat, peer, deadline, label), flat)

    def receive(self, flat: torch.Tensor, peer: int, deadline: float) -> Pending:
        poison(flat)
        return self.inner.receive(flat, peer, deadline)

    def lend(self, held: InPlace, peer: int, deadline: float) -> Pending:
        return self.inner.lend(held, peer, deadline)  # parameters, which are not to be written to

    def let_go(self) -> None:
        self.inner.let_go()

    def borrow(self, nbytes: int, peer: int, deadline: float) -> Borrowing:
        return _PoisonBorrowing(self.inner.borrow(nbytes, peer, deadline))

    def all_gather(self, flat: torch.Tensor, deadline: float) -> Pending:
        for index, each in enumerate(flat.chunk(self.world_size)):
            if index != self.rank:
                poison(each)
        return self.inner.all_gather(flat, deadline)

    def close(self) -> None:
        self.inner.close()

    def _poisoning(self, transfer: Pending, flat: torch.Tensor) -> Pending:
        self.ledger[flat.data_ptr()] += 1
        return _Poisoning(transfer, self.ledger, flat)


class _Poisoning:
    def __init__(self, inner: Pending, ledger: Counter, flat: torch.Tensor):
        self.inner, self.ledger, self.flat = inner, ledger, flat

    def wait(self, deadline: float) -> None:
        try:
            self.inner.wait(deadline)
        finally:  # a link that failed reads no more either
            self.ledger[self.flat.data_ptr()] -= 1
        if not self.ledger[self.flat.data_ptr()]:
            poison(self.flat)


@dataclass
class _PoisonBorrowing:
    inner: Borrowing

    def wait(self, deadline: float) -> _PoisonLent:
        return _PoisonLent(self.inner.wait(deadline))


class _PoisonLent:
    def __init__(self, inner: Lent):
        self.inner, self.flat, self.made = inner, inner.flat, inner.made
        self.description, self.storages = inner.description, inner.storages

    def give_back(self) -> None:
        if self.flat is not None:
            poison(self.flat)
        self.inner.give_back()


def poison_transport(monkeypatch, name: str) -> None:
    """Make every transport called `name` that this process builds a poisoning one."""
    plain, ledger = transports.TRANSPORTS[name], Counter()
    monkeypatch.setitem(transports.TRANSPORTS, name, lambda meeting, deadline: PoisonTransport(
        plain(meeting, deadline), ledger, meeting.rank, meeting.world_size))
