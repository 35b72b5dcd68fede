"""The trainer's end of one link, by hand: all senders of a plan, in one thread."""
from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Optional, Sequence

import torch
import torch.distributed as dist

from mrl.receiver.mrl_receiver.delta import pack, whole
from mrl.receiver.mrl_receiver.links import Meeting, Transport, open_store
from mrl.receiver.mrl_receiver.receive import Receiver
from mrl.receiver.mrl_receiver.transports import connect
from mrl.receiver.mrl_receiver.wire import BROADCAST, PEERS, Plan, SyncRequest, announced_key, ready_key, sums_key
from tests.receiver.toy import flat_of, sums_of


class Senders:
    def __init__(self, wire: dict[str, Any], transport: str = "gloo"):
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.wire, self.plan, self.transport = wire, Plan.from_wire(wire), transport
        self.broadcasts: dict[int, Transport] = {}
        self.peers: list[Transport] = []
        self.flat_of = flat_of
        self.links, self.connected = 0, False
        self.last: Optional[int] = None  # the push before over this link
        self.sent: dict[tuple[int, int], torch.Tensor] = {}  # by bucket and slice, for requests with delta
        self.kinds: list[int] = []  # of the messages of the last one

    def request(self, step: int, **changes) -> SyncRequest:
        """For this link, which is built if need be; with the plan, for prepare."""
        request = SyncRequest(
            run_id="run", engine=0, incarnation=1, version=(0, step), push=step, link=f"link/{self.links}",
            connect=not self.connected, store_host="127.0.0.1", store_port=self.store.port, plan=self.wire, buffers=2,
            transport=self.transport, verify=False, deadline_s=300.0, after=self.last)
        return replace(request, **changes, **({"after": None} if changes.get("delta") else {}))

    def connect(self, request: SyncRequest) -> None:
        if request.after is not None:
            self.store.set(announced_key(request.link, request.after), request.to_json())
        self.store.wait([ready_key(request, worker) for worker in range(self.plan.workers)])
        self.last = None if request.delta else request.push
        if self.connected:
            return
        self.connected = True
        deadline, workers = time.monotonic() + 300, self.plan.workers

        def build(part: str, rank: int, world_size: int) -> Transport:
            store = open_store("127.0.0.1", self.store.port, deadline)
            return connect(request.transport, Meeting(store, "127.0.0.1", request.link, part, rank, world_size,
                                                      torch.device("cpu")), deadline)

        self.broadcasts = {sender: build(BROADCAST.format(sender), 0, 1 + workers) for sender in self.plan.broadcasters}
        if self.plan.point_to_point:
            count = self.plan.senders
            with ThreadPoolExecutor(count) as pool:
                self.peers = [*pool.map(lambda sender: build(PEERS, sender, count + workers), range(count))]

    def send(self, request: SyncRequest, values, count: int = 99) -> None:
        """Send the first `count` buckets, and the checksums if they are wanted."""
        self.connect(request)
        deadline = time.monotonic() + request.deadline_s
        self.kinds = []
        for bucket in self.plan.buckets[:count]:
            pending = []
            for place, one in enumerate(bucket.slices):
                flat = self.flat_of(one, values, bucket.torch_dtype)
                messages = self.message((bucket.index, place), flat, request) if request.delta else [flat]
                for message in messages if one.numel else ():
                    if bucket.mode == "broadcast":
                        pending.append(self.broadcasts[one.sender].broadcast(message, deadline))
                    else:
                        workers = range(place, self.plan.workers, self.plan.node) if bucket.worker is None \
                            else [bucket.worker]
                        pending += [self.peers[one.sender].send(message, self.plan.senders + worker, deadline)
                                    for worker in workers]
            for transfer in pending:
                transfer.wait(deadline)
        if request.verify:
            for sender in range(self.plan.senders):
                self.store.set(sums_key(request, sender), json.dumps(sums_of(self.plan, sender, values)))

    def message(self, key: tuple[int, int], flat: torch.Tensor, request: SyncRequest) -> list[torch.Tensor]:
        """Header and payload: what has changed, if the request has a base and that is shorter."""
        delta = pack(flat, self.sent[key]) if request.base is not None and flat.numel() else None
        self.sent[key] = flat.clone()
        header, payload = delta or (whole(flat), flat)
        self.kinds.append(header.kind)
        return [torch.tensor(header), *([payload] if payload.numel() else [])]

    def hang_up(self) -> None:
        for transport in [*self.broadcasts.values(), *self.peers]:
            transport.close()
        self.links, self.connected, self.last = self.links + 1, False, None


def receive(receivers: Sequence[Receiver], request: SyncRequest) -> tuple[list[threading.Thread], list]:
    """Prepare and receive on every worker, in threads; their replies or errors come to be in the list."""
    outcomes: list = [None] * len(receivers)

    def work(i: int) -> None:
        try:
            if request.connect:
                receivers[i].prepare(request)
                receivers[i].prove(request)
            outcomes[i] = receivers[i].receive(request)
        except Exception as error:
            outcomes[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(receivers))]
    for thread in threads:
        thread.start()
    return threads, outcomes


def sync(senders: Senders, receivers: Sequence[Receiver], request: SyncRequest, values, count: int = 99) -> list:
    """One sync, or the beginning of one; what became of it on every worker."""
    threads, outcomes = receive(receivers, request)
    senders.send(request, values, count)
    if count < len(senders.plan.buckets):
        senders.hang_up()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    return outcomes
