"""A reserved port stays ours until the server listens on it; a taken one is named."""
import socket
from contextlib import suppress

import pytest

from mrl.engine.api import EngineStartError
from mrl.engine.ports import reserve_port


def server_socket(port: int) -> socket.socket:
    """Binds and listens the way vLLM does."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(("127.0.0.1", port))
    sock.listen()
    return sock


def test_the_server_gets_every_connection_while_the_port_is_held():
    with reserve_port("127.0.0.1", 0, "rollout.port") as port, server_socket(port) as server:
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", port), timeout=300):
                server.accept()[0].close()


def test_two_reservations_never_meet():
    with reserve_port("127.0.0.1", 0, "k") as first, reserve_port("127.0.0.1", 0, "k") as second:
        assert first != second


@pytest.mark.parametrize("reuse", [False, True])
def test_a_taken_port_is_an_error_even_when_it_could_be_shared(reuse):
    with (server_socket(0) if reuse else socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EngineStartError, match=rf"rollout.port: cannot use port {port} .*choose another"):
            with reserve_port("127.0.0.1", port, "rollout.port"):
                pass


def test_a_free_fixed_port():
    """Of those that the kernel gives to nobody who asks for any."""
    for port in range(21000, 21100):
        with suppress(EngineStartError), reserve_port("127.0.0.1", port, "k") as reserved:
            assert reserved == port
            return
    pytest.fail("none is free")
