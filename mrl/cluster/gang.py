"""How the trainer ranks of one gang talk about what to do: orders from rank 0, meetings, and the scatter of a batch.

All stay off the GPU collectives: a rank that waits for a batch waits on a store, with a heartbeat and a deadline.
"""
from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from typing import Any, Callable

import torch.distributed as dist

from mrl.reshard.layout import Layout

HEARTBEAT_TIMEOUT_S = 120.0
WAIT_SLICE_S = 5.0


class Orders:
    """A sequence of small messages from rank 0 to every rank, over a TCPStore of its own."""

    def __init__(self, rank: int):
        self.rank = rank
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        port = [0]
        if rank == 0:
            self.store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            port = [self.store.port]
        dist.broadcast_object_list(port, src=0)
        if rank != 0:
            self.store = dist.TCPStore(host, port[0], is_master=False)
        self.count = 0

    def exchange(self, decide: Callable[[Callable[[], None]], Any], timeout_s: float) -> Any:
        """The JSON-able value that `decide(beat)` returns on rank 0, on every rank.

        `decide` runs on rank 0 alone and calls `beat()` at least every few seconds while it waits. The other ranks
        raise TimeoutError when rank 0 has been silent for HEARTBEAT_TIMEOUT_S or `timeout_s` has passed.
        """
        key, self.count = f"order/{self.count}", self.count + 1
        if self.rank == 0:
            value = decide(lambda: self.store.add("heartbeat", 1))
            self.store.set(key, json.dumps(value))
            return value
        deadline, heard, beats = time.monotonic() + timeout_s, time.monotonic(), -1
        while True:
            try:
                self.store.wait([key], timedelta(seconds=WAIT_SLICE_S))
                return json.loads(self.store.get(key))
            except dist.DistStoreError:
                now, count = time.monotonic(), self.store.add("heartbeat", 0)
                heard, beats = (heard, beats) if count == beats else (now, count)
                if now - heard > HEARTBEAT_TIMEOUT_S:
                    raise TimeoutError(f"rank {self.rank} heard nothing from rank 0 for {now - heard:.0f} s") from None
                if now > deadline:
                    raise TimeoutError(f"rank {self.rank} got no order from rank 0 within {timeout_s:.0f} s") from None


def meeting() -> Callable[[], None]:
    """A function that returns when every rank has called it. Collective, over gloo."""
    group = dist.new_group(backend="gloo")
    return lambda: dist.barrier(group)


class Scatter:
    """Gives every data-parallel replica its share of what rank 0 holds: one copy to the replica's first rank over
    gloo, and from there to the replica's other ranks."""

    def __init__(self, layout: Layout, rank: int):
        replicas = [[rank for rank in range(layout.world) if layout.replica(layout.coord(rank)) == replica]
                    for replica in range(layout.replicas)]
        leaders = [ranks[0] for ranks in replicas]
        self.rank, self.leaders = rank, leaders
        self.leader_group = dist.new_group(leaders, backend="gloo")
        for ranks in replicas:  # every rank must take part in making every group
            group = dist.new_group(ranks, backend="gloo")
            if rank in ranks:
                self.leader, self.replica_group = ranks[0], group

    def __call__(self, shares: list | None) -> Any:
        """`shares` on rank 0: one picklable object a replica. Returns this rank's replica's, on every rank."""
        out: list[Any] = [None]
        if self.rank in self.leaders:
            dist.scatter_object_list(out, shares, src=0, group=self.leader_group)
        dist.broadcast_object_list(out, src=self.leader, group=self.replica_group)
        return out[0]

    def gather(self, part: Any) -> list | None:
        """The reverse: what each replica gives, the same picklable object on all its ranks, as a list on rank 0."""
        if self.rank not in self.leaders:
            return None
        parts: list[Any] | None = [None] * len(self.leaders) if self.rank == 0 else None
        dist.gather_object(part, parts, dst=0, group=self.leader_group)
        return parts
