"""The order in which a worker reads buckets, waits for its copies, and gives them back; fake connections around it."""
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from mrl.receiver.mrl_receiver.links import LinkError
from mrl.receiver.mrl_receiver.transfer import Incoming
from tests.waiting import wait_until

BUCKETS, RING = 5, 2


@dataclass
class Lent:
    said: list
    position: int

    def give_back(self) -> None:
        self.said.append(f"give back {self.position}")


class Connections:
    """Bucket i comes when `come[i]` is set; with an error if it is in `broken`."""

    device, neighbours = torch.device("cpu"), None

    def __init__(self, said: list, broken=()):
        self.said, self.broken, self.closed = said, broken, False
        self.come = [threading.Event() for _ in range(BUCKETS)]

    def borrow(self, bucket: int, deadline: float) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda deadline: self.wait(bucket))

    def begin(self, bucket: int, slot, deadline: float) -> SimpleNamespace:
        self.said.append(f"receive {bucket}")
        return SimpleNamespace(wait=lambda deadline: self.wait(bucket))

    def wait(self, bucket: int) -> Lent:
        assert self.come[bucket].wait(60)
        if bucket in self.broken:
            raise LinkError("broken")
        return Lent(self.said, bucket)

    def close(self) -> None:
        self.closed = True


class Worker:
    """`said` is what happens, in order: apply i, finish i, give back i."""

    def __init__(self, lent: bool = True, broken=(), fails_at: int = -1):
        self.said, self.fails_at = [], fails_at
        self.connections = Connections(self.said, broken)
        self.incoming = Incoming(range(BUCKETS), None if lent else [None] * BUCKETS, RING, self.connections,
                                 time.monotonic() + 60)

    def apply(self, position: int, lent):
        assert lent is None or lent.position == position
        self.said.append(f"apply {position}")
        if position == self.fails_at:
            raise RuntimeError("the loader refuses")
        return lambda: self.said.append(f"finish {position}")

    def come(self, count: int) -> None:
        """Let the first `count` buckets come."""
        for event in self.connections.come[:count]:
            event.set()

    def have(self, count: int) -> None:
        """Let them come, and wait until as many are there as may be before one is given back."""
        self.come(count)
        wait_until(lambda: self.incoming.stages[-1].done.qsize() == min(count, RING))


def test_the_next_lent_bucket_is_applied_before_the_last_is_waited_for():
    worker = Worker()
    worker.have(BUCKETS)
    worker.incoming.put_in_place(worker.apply)
    assert worker.said[:4] == ["apply 0", "apply 1", "finish 0", "give back 0"]
    order = {what: place for place, what in enumerate(worker.said)}
    for position in range(BUCKETS):
        assert order[f"apply {position}"] < order[f"finish {position}"] < order[f"give back {position}"]
    assert len(worker.said) == 3 * BUCKETS and not worker.incoming.applied and not worker.incoming.lent


def test_nothing_is_kept_waiting_for_a_bucket_that_has_not_come():
    worker = Worker()
    worker.come(1)
    thread = threading.Thread(target=worker.incoming.put_in_place, args=(worker.apply,))
    thread.start()
    wait_until(lambda: worker.said == ["apply 0", "finish 0", "give back 0"])
    worker.come(BUCKETS)
    thread.join(60)
    assert worker.said[3] == "apply 1" and worker.said[-1] == f"give back {BUCKETS - 1}"


def test_a_slot_is_received_into_again_as_soon_as_it_has_been_read():
    worker = Worker(lent=False)
    worker.have(BUCKETS)
    worker.incoming.put_in_place(worker.apply)
    own = [what for what in worker.said if not what.startswith("receive")]
    assert own == [f"{what} {position}" for position in range(BUCKETS) for what in ("apply", "finish")]
    order = {what: place for place, what in enumerate(worker.said)}
    for position in range(RING, BUCKETS):
        assert order[f"finish {position - RING}"] < order[f"receive {position}"]


@pytest.mark.parametrize("failing", [{"fails_at": 2}, {"broken": (2,)}])
def test_nothing_is_held_after_an_error(failing):
    worker = Worker(**failing)
    worker.have(BUCKETS)
    with pytest.raises(RuntimeError, match="the loader refuses|broken"):
        worker.incoming.put_in_place(worker.apply)
    assert worker.connections.closed and not worker.incoming.applied and not worker.incoming.lent
    assert not any(stage.is_alive() for stage in worker.incoming.stages)
    assert f"apply {BUCKETS - 1}" not in worker.said
