"""Communicators between the senders and one engine's workers, and the store where they meet.

A link's communicator is a process group outside torch's default one: rank 0 sends, rank 1 + w is worker w. A new
transport is one more class with `send`, `receive` and `close`.
"""
from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

SENDER_RANK = 0
CONNECT_TIMEOUT_S = 30.0
"""For meeting at the store. Both ends have said that they are ready, so a peer that stays away has died."""


class LinkError(RuntimeError):
    """A peer is gone, or the deadline has passed; the communicator is not usable any more."""


class Pending(Protocol):
    """A broadcast under way."""

    def wait(self, deadline: float) -> None:
        """Return when the buffer may be read or written again. LinkError when it failed or `deadline` passed."""


class Transport(Protocol):
    """One communicator. Buffers are flat and contiguous; both ends know their sizes from the plan.

    `deadline` is a time.monotonic() value.
    """

    def broadcast(self, flat: torch.Tensor, deadline: float) -> Pending:
        """Begin to send `flat` (rank 0) or to receive into it (the others)."""

    def close(self) -> None:
        """Give up: everything under way fails, here and at the peers."""


def _words(error: Exception) -> str:
    """The first sentence of one of gloo's errors, without its place in gloo's source."""
    line = (str(error).splitlines() or ["?"])[0]
    return line.split("] ", 1)[-1].split(". ", 1)[0]


class _GlooPending:
    def __init__(self, work: dist.Work, name: str):
        self.work, self.name = work, name

    def wait(self, deadline: float) -> None:
        try:
            self.work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except RuntimeError as error:
            raise LinkError(f"link {self.name}: {_words(error)}") from error


class GlooTransport:
    """Broadcasts over TCP. Works for tensors of any device that gloo can stage through the host."""

    def __init__(self, store: dist.Store, name: str, rank: int, world_size: int, address: str, deadline: float):
        """Meets the other ranks at `store` under `name`. `address`: the local address to listen on."""
        self.name = name
        timeout = timedelta(seconds=max(0.001, min(CONNECT_TIMEOUT_S, deadline - time.monotonic())))
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        try:
            self.group = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, world_size, options)
        except RuntimeError as error:
            raise LinkError(f"link {name} could not be built: {_words(error)}") from error

    def broadcast(self, flat: torch.Tensor, deadline: float) -> Pending:
        if self.group is None:
            raise LinkError(f"link {self.name} is closed")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = SENDER_RANK, 0
        options.timeout = timedelta(seconds=max(0.001, deadline - time.monotonic()))
        try:
            return _GlooPending(self.group.broadcast([flat], options), self.name)
        except RuntimeError as error:
            raise LinkError(f"link {self.name}: {_words(error)}") from error

    def close(self) -> None:
        if self.group is not None:
            self.group.abort()
            self.group = None


TRANSPORTS = {"gloo": GlooTransport}


def open_store(host: str, port: int, deadline: float) -> dist.TCPStore:
    """A connection of one's own to the store at host:port (a blocking call holds its connection). LinkError."""
    timeout = timedelta(seconds=max(0.001, deadline - time.monotonic()))
    try:
        return dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        raise LinkError(f"no weight store at {host}:{port}: {_words(error)}") from error


def address_towards(host: str) -> str:
    """The address of this machine on the way to `host` (127.0.0.1 for a loopback one); nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]
