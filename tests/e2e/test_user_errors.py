"""What only the running parts can find out still ends as one clear message: exit code 2, no traceback, nothing left."""
from __future__ import annotations

import socket

import pytest

from tests.e2e.runs import MRL, assert_nothing_left, start

pytestmark = pytest.mark.slow


@pytest.fixture
def taken_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def fails(log, overrides: list[str], *words: str) -> None:
    process = start([str(MRL), "train", "configs/quickstart_cpu.yaml", f"log.dir={log.parent}", *overrides], log)
    code = process.wait(180)
    console = log.read_text()
    assert code == 2 and "Traceback" not in console, console[-3000:]
    assert all(word in console for word in words), console[-3000:]
    assert_nothing_left(log)


def test_a_prompt_longer_than_allowed(warm_start, tmp_path):
    fails(tmp_path / "console.log", ["data.max_prompt_tokens=3"], "row 0", "data.max_prompt_tokens is 3")


def test_a_port_that_is_taken(warm_start, tmp_path, taken_port):
    fails(tmp_path / "console.log", [f"rollout.port={taken_port}"], "rollout.port", str(taken_port))
