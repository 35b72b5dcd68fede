"""The poisoning transport itself: that it betrays a buffer used too late, and only that."""
import time

import pytest
import torch
import torch.distributed as dist

from mrl.receiver.mrl_receiver.links import Label, Meeting
from mrl.receiver.mrl_receiver.transports import connect
from tests.receiver.poison import poison_transport


@pytest.fixture
def links(monkeypatch, tmp_path):
    """Of two engines with one worker: (sender, worker) each."""
    poison_transport(monkeypatch, "disk")
    store = dist.HashStore()
    return [[connect("disk", Meeting(store, "127.0.0.1", f"link/{engine}", "from", rank, 2, torch.device("cpu"),
                                     tmp_path), time.monotonic() + 300) for rank in range(2)] for engine in range(2)]


def test_a_sent_buffer_is_poisoned_when_the_last_link_has_it(links):
    deadline = time.monotonic() + 300
    flat = torch.ones(6, dtype=torch.bfloat16)
    first, second = [sender.broadcast(flat, deadline, Label("0/0")) for sender, _ in links]
    first.wait(deadline)
    assert flat.eq(1).all()
    second.wait(deadline)
    assert flat.isnan().all()
    got = torch.zeros(6, dtype=torch.bfloat16)
    for _, worker in links:
        worker.broadcast(got, deadline).wait(deadline)
        assert got.eq(1).all()


def test_a_buffer_handed_back_for_receiving_is_poisoned(links):
    flat = torch.ones(6)
    links[0][1].receive(flat, 0, time.monotonic() + 300)
    assert flat.isnan().all()
