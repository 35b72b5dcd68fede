"""NCCL links between two processes that see one GPU each: whole syncs, every operation, speed, and ends that die or
never come."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.receiver.transport_gang import run as run_ranks
from tests.torchrun import ROOT

pytestmark = pytest.mark.gpu
PEER = Path(__file__).with_name("nccl_peer.py")


def start(role: str, port: int, scenario: str) -> subprocess.Popen:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "0" if role == "sender" else "1",
           "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.Popen([sys.executable, str(PEER), role, str(port), scenario], env=env, cwd=ROOT, text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def last_line(process: subprocess.Popen) -> dict:
    line = process.stdout.readline()
    assert line, f"ended with exit code {process.wait(30)}"
    return json.loads(line)


@pytest.fixture
def run(gpus):
    """run(scenario, with_receiver) -> (the sender's result, the receiver's)."""
    gpus(2)
    started = []

    def both(scenario: str, with_receiver: bool = True) -> tuple[dict, dict]:
        sender = start("sender", 0, scenario)
        started.append(sender)
        port = int(sender.stdout.readline())
        if not with_receiver:
            return last_line(sender), {}
        receiver = start("receiver", port, scenario)
        started.append(receiver)
        if scenario == "die-sender":  # its store dies with it
            return last_line(sender), last_line(receiver)
        received = last_line(receiver)
        return last_line(sender), received

    yield both
    for process in started:
        process.kill()
        process.wait(30)


def test_speed(run, record_property):
    sender, receiver = run("speed")
    print(f"512 MiB broadcasts: {sender['gb_per_s']:.0f} GB/s sent, {receiver['gb_per_s']:.0f} GB/s received")
    assert sender["gb_per_s"] > 20  # PCIe at worst


def test_a_dead_engine_costs_the_sender_only_its_link(run):
    sender, _ = run("die-receiver")
    assert "link/0: " in sender["error"] and sender["noticed_s"] < 5, sender
    print(sender)


def test_dead_trainers_leave_the_engine_alive(run):
    _, receiver = run("die-sender")
    assert "the weight store is gone" in receiver["error"] and receiver["noticed_s"] < 5, receiver
    print(receiver)


def test_a_peer_that_never_comes(run):
    sender, _ = run("absent", with_receiver=False)
    assert "timed out" in sender["error"] and 2 <= sender["noticed_s"] < 6, sender
    print(sender)


def test_every_operation_bit_for_bit_then_a_silent_and_a_killed_peer(gpus):
    gpus(2)
    first, second = run_ranks("nccl", 2, "transfers", "broadcast", "gather", "speed", "patience", "lose", gpus=[0, 1])
    for rank in (first, second):
        assert all(rank[scenario] == {"wrong": []} for scenario in ("transfers", "broadcast", "gather")), rank
    print(f"512 MiB from rank to rank: {first['speed']['gb_per_s']:.0f} GB/s")
    assert first["speed"]["gb_per_s"] > 20
    assert "timed out" in first["patience"]["error"] and 1 <= first["patience"]["seconds"] < 5, first
    assert "a peer gave it up" in second["patience"]["error"] and second["patience"]["seconds"] < 10, second
    assert "a peer gave it up" in first["lose"]["error"] and first["lose"]["seconds"] < 10, first
    assert first["lose"]["closed"] == "link link/lose/lose is closed" and "lose" not in second
