"""cuda_ipc between processes on one GPU: every byte, speed, and ends that die; and two that are not on the same GPU."""
from math import prod

import pytest

from tests.receiver.transport_gang import run
from tests.receiver.transport_peer import LENDINGS, LENT

pytestmark = pytest.mark.gpu
WORLD = 3


def test_every_byte_then_a_silent_and_a_killed_peer(gpus):
    gpus(1)
    said = run("cuda_ipc", WORLD, "transfers", "broadcast", "lend", "speed", "patience", "lose", gpus=[0] * WORLD)
    for rank in said:
        assert all(rank[scenario] == {"wrong": []} for scenario in ("transfers", "broadcast")), rank
    assert said[1]["lend"] == {"outcomes": [True] * LENDINGS}, said[1]
    assert min(said[0]["lend"]["outcomes"]) >= 2 * prod(LENT), "memory that was lent is not given back"
    print(f"512 MiB from process to process: {said[0]['speed']['gb_per_s']:.0f} GB/s")
    assert said[0]["speed"]["gb_per_s"] > 100  # memory of one GPU
    assert "timed out" in said[0]["patience"]["error"] and 1 <= said[0]["patience"]["seconds"] < 3
    for rank in said[1:]:
        assert "a peer gave it up" in rank["patience"]["error"] and rank["patience"]["seconds"] < 15, rank
    assert all(rank["lose"]["seconds"] < 15 for rank in said[:-1]), said
    assert any(f"rank {WORLD - 1} is gone" in rank["lose"]["error"] for rank in said[:-1]), said


def test_memory_whose_borrower_was_killed_can_be_given_up(gpus):
    gpus(1)
    lender, _ = run("cuda_ipc", 2, "lend_and_lose", gpus=[0, 0])
    assert "rank 1 is gone" in lender["lend_and_lose"]["error"]
    assert lender["lend_and_lose"]["returned"] >= 2 * prod(LENT)


def test_ranks_on_different_gpus_are_refused(gpus):
    gpus(2)
    sender, worker = run("cuda_ipc", 2, "strangers", gpus=[0, 1])
    assert "sends from GPU" in worker["strangers"]["error"]
    assert "a peer gave it up" in sender["strangers"]["error"] and sender["strangers"]["seconds"] < 5
