"""Handing a free TCP port to a server without a race."""
from __future__ import annotations

import errno
import socket
from contextlib import contextmanager
from typing import Iterator

from mrl.engine.api import EngineStartError


@contextmanager
def reserve_port(host: str, port: int, key: str) -> Iterator[int]:
    """Hold a port for a server that binds with SO_REUSEPORT itself; release it when that server answers.

    The holding socket is bound but never listens, so every connection goes to the server. `port` 0: any free one.
    EngineStartError naming configuration key `key` when the port is taken.
    """
    if port:  # alone, without SO_REUSEPORT: it would let us join another server of the same user
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _bind(probe, host, port, key)
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        _bind(holder, host, port, key)
        yield holder.getsockname()[1]


def _bind(sock: socket.socket, host: str, port: int, key: str) -> None:
    try:
        sock.bind((host, port))
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        remedy = f"another program has port {port}; choose another {key}, or 0 for a free one" if taken else str(error)
        raise EngineStartError(f"{key}: cannot use port {port} on {host}: {remedy}") from error
