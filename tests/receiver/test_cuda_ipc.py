"""cuda_ipc between real processes, with memory-mapped files in the place of a GPU's memory: all of it but CUDA."""
import socket
import time

import pytest
import torch
import torch.distributed as dist

from mrl.receiver.mrl_receiver import cuda_ipc
from mrl.receiver.mrl_receiver.cuda_ipc import CudaIpcTransport
from mrl.receiver.mrl_receiver.links import LinkError, Meeting
from tests.receiver.transport_gang import run
from tests.receiver.transport_peer import LENDINGS, HostIpc

WORLD = 3


@pytest.fixture(scope="module")
def said() -> list[dict]:
    return run("host_ipc", WORLD, "transfers", "broadcast", "lend", "strangers", "patience", "lose")


def test_every_byte_arrives_from_buffers_that_come_and_go(said):
    assert [rank[scenario] for rank in said for scenario in ("transfers", "broadcast")] == [{"wrong": []}] * 2 * WORLD


def test_memory_is_lent_in_place_for_one_sync_at_a_time(said):
    lender, borrower, other = (rank["lend"] for rank in said)
    assert borrower == {"outcomes": [True] * LENDINGS} and len(lender["outcomes"]) == LENDINGS and other == {}


def test_a_killed_borrower_is_noticed_at_once():
    lender, borrower = run("host_ipc", 2, "lend_and_lose")
    assert "rank 1 is gone" in lender["lend_and_lose"]["error"] and not borrower


def test_the_deadline_holds_and_who_gives_up_takes_the_others_along(said):
    first, *others = [rank["patience"] for rank in said]
    assert 1 <= first["seconds"] < 15 and "timed out" in first["error"]
    assert all(other["seconds"] < 15 and "a peer gave it up" in other["error"] for other in others), others


def test_a_killed_peer_is_noticed_at_once(said):
    assert "lose" not in said[-1]
    for rank in said[:-1]:
        assert rank["lose"]["seconds"] < 15 and rank["lose"]["closed"] == "link link/lose/lose is closed", rank
    assert any(f"rank {WORLD - 1} is gone" in rank["lose"]["error"] for rank in said[:-1])


def test_a_worker_on_another_gpu_is_refused_and_the_sender_hears_of_it(said):
    sender, worker, _ = said
    assert "sends from GPU GPU-0, this rank is on GPU-1" in worker["strangers"]["error"]
    assert "a peer gave it up" in sender["strangers"]["error"] and sender["strangers"]["seconds"] < 15


def test_a_peer_that_hangs_in_the_middle_of_a_message_is_given_up(monkeypatch):
    monkeypatch.setattr(cuda_ipc, "STALL_S", 1)
    transport = HostIpc(Meeting(dist.HashStore(), "127.0.0.1", "link", "p2p", 0, 2, torch.device("cpu")), 0.0)
    mine, others = socket.socketpair()
    transport.peers[1] = cuda_ipc._Peer(cuda_ipc._connection(mine))
    with others:
        others.send(b"\0\0")  # half of the length of what is to come
        with pytest.raises(LinkError, match="rank 1 hangs: nothing was read or sent for 1 s"):
            transport.hear(1, 1, time.monotonic() + 60)
        with pytest.raises(LinkError, match="rank 1 hangs"):
            transport.say(1, {"number": 1}, b"x" * (64 << 20))  # more than a socket takes that nobody reads
    transport.close()


def test_buffers_on_the_host_are_refused():
    meeting = Meeting(dist.HashStore(), "127.0.0.1", "link", "p2p", 0, 2, torch.device("cpu"))
    with pytest.raises(LinkError, match="needs buffers on a GPU, not on cpu"):
        CudaIpcTransport(meeting, 0.0)
