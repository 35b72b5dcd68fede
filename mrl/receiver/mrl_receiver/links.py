"""Communicators between the senders and one engine's workers, and the store where they meet.

A link has several, all outside torch's default process group: one a sender that broadcasts (rank 0 sends, rank 1 + w
is worker w), one for transfers from one rank to another (the senders, then the workers), one among the workers of each
engine node. This is what all transports share; each is a class in a file of its own, listed in `transports.py`.
"""
from __future__ import annotations

import socket
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Optional, Protocol, Sequence

import torch
import torch.distributed as dist

from .in_place import InPlace
from .wire import Part

SENDER_RANK = 0
"""Of whoever broadcasts."""
CONNECT_TIMEOUT_S = 30.0
"""For meeting at the store. Both ends have said that they are ready, so a peer that stays away has died."""


class LinkError(RuntimeError):
    """A peer is gone, or the deadline has passed; the communicator is not usable any more."""


def failed_key(link: str) -> str:
    """Store key that says, once set, that a link has failed and that nobody need wait for anything over it."""
    return f"{link}/failed"


def words(error: Exception) -> str:
    """The first sentence of one of torch's errors, without its place in torch's source."""
    line = (str(error).splitlines() or ["?"])[0]
    return line.split("] ", 1)[-1].split(". ", 1)[0]


def remaining(deadline: float) -> timedelta:
    """The time until `deadline`, a time.monotonic() value; never zero, which torch takes for no limit."""
    return timedelta(seconds=max(0.001, deadline - time.monotonic()))


@dataclass(frozen=True)
class Meeting:
    """Where and as whom a rank meets the others of one communicator: `part` of `link`.

    store: a connection to the weight store at `host`, not shared with a thread that may block in it. part: names the
    communicator within its link. device: where the buffers lie. folder: where a sender leaves files for the others.
    """

    store: dist.Store
    host: str
    link: str
    part: str
    rank: int
    world_size: int
    device: torch.device
    folder: Optional[Path] = None

    @property
    def name(self) -> str:
        return f"{self.link}/{self.part}"

    def given_up(self) -> Optional[str]:
        """Why nothing more will come over this link; None while it may."""
        try:
            return "a peer gave it up" if self.store.check([failed_key(self.link)]) else None
        except RuntimeError as error:
            return f"the weight store is gone ({words(error)})"

    def give_up(self) -> None:
        """Tell the others."""
        with suppress(RuntimeError):  # without the store the others give up by themselves
            self.store.set(failed_key(self.link), "1")


class Pending(Protocol):
    """A transfer under way."""

    def wait(self, deadline: float) -> None:
        """Return when the buffer may be read or written again. LinkError when it failed or `deadline` passed.

        A peer that gives up may make it return too, with anything in the buffer. So what was received counts only when
        nobody has given up by the end of it all.
        """


@dataclass(frozen=True)
class PendingAll:
    """Several transfers as one."""

    transfers: Sequence[Pending]

    def wait(self, deadline: float) -> None:
        for transfer in self.transfers:
            transfer.wait(deadline)


@dataclass(frozen=True)
class Label:
    """What a sent buffer holds, for a transport that writes it down under its name.

    key: names the buffer among all that this gang sends; the same key to several engines means the same bytes.
    parts: the plan's parts in the buffer; none in a message that is no weights.
    """

    key: str
    parts: Sequence[Part] = ()


class Transport(Protocol):
    """One communicator. Buffers are flat and contiguous, of any dtype; both ends know their sizes from the plan.

    Ranks give their calls in one common order. A call waits for what this thread has queued on its current stream;
    what other streams do to the buffer must be over. `deadline` is a time.monotonic() value. All raise LinkError.
    """

    def broadcast(self, flat: torch.Tensor, deadline: float, label: Optional[Label] = None) -> Pending:
        """Begin to send `flat`, which holds what `label` says, to everybody (rank 0), or to receive into it."""

    def send(self, flat: torch.Tensor, peer: int, deadline: float, label: Optional[Label] = None) -> Pending:
        """Begin to send `flat` to rank `peer`, which receives as many bytes."""

    def receive(self, flat: torch.Tensor, peer: int, deadline: float) -> Pending:
        """Begin to receive into `flat` what rank `peer` sends."""

    def close(self) -> None:
        """Give up: everything under way fails, here and at the peers."""


class Gathering(Transport, Protocol):
    """A communicator that can also join slices: what the workers of an engine node need among themselves."""

    def all_gather(self, flat: torch.Tensor, deadline: float) -> Pending:
        """Begin to fill `flat`, as many equal slices as there are ranks, of which slice `rank` is there already."""


class Lent(Protocol):
    """A peer's memory, to be read where it lies."""

    flat: Optional[torch.Tensor]
    """A buffer, uint8 and contiguous; or None, and what there is to read is what `description` says of `storages`."""
    made: dict[Any, Any]
    """For what its borrower derives from a buffer, such as views; forgotten when that memory goes."""
    description: bytes
    storages: tuple[torch.UntypedStorage, ...]

    def give_back(self) -> None:
        """It has been read; the peer may write to it. LinkError."""


class Borrowing(Protocol):
    """What a peer will lend."""

    def wait(self, deadline: float) -> Lent:
        """Return when it may be read. LinkError, as with Pending."""


class Lending(Transport, Protocol):
    """A communicator within one memory, where what is sent need not be copied to be read."""

    def borrow(self, nbytes: int, peer: int, deadline: float) -> Borrowing:
        """As `receive` of that many bytes, without a buffer to copy them to."""

    def lend(self, held: InPlace, peer: int, deadline: float) -> Pending:
        """As `send`, of what has not been gathered in a buffer. All device work on it must be done."""

    def let_go(self) -> None:
        """A sync is over: forget the memory that `lend` has lent in it, as either end. No view of it may be left."""


def own_stream(device: torch.device) -> AbstractContextManager:
    """Within the block this thread queues its device work behind nobody else's; nothing on the CPU."""
    return nullcontext() if device.type == "cpu" else torch.cuda.stream(torch.cuda.Stream(device))


def finish_stream(device: torch.device) -> None:
    """Wait until all that this thread has queued on `device` is done, and for nothing else: not for transfers."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()


def wait_for_queued(device: torch.device) -> Callable[[], None]:
    """What waits for all that this thread has queued on `device` until now, and not for what comes after that."""
    if device.type == "cpu":
        return lambda: None
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event.synchronize


def open_store(host: str, port: int, deadline: float) -> dist.TCPStore:
    """A connection of one's own to the store at host:port (a blocking call holds its connection). LinkError."""
    try:
        return dist.TCPStore(host, port, is_master=False, timeout=remaining(deadline), wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        raise LinkError(f"no weight store at {host}:{port}: {words(error)}") from error


def address_towards(host: str) -> str:
    """The address of this machine on the way to `host` (127.0.0.1 for a loopback one); nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]
