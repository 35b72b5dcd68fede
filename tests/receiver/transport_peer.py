"""One rank of some communicators, in a process of its own. Arguments: transport, rank, world size, port of the store,
scenarios separated by commas. Prints one JSON line a scenario: what happened.

On a GPU, this process sees one of its own. Scenarios: transfers, broadcast, gather, patience (nobody sends), lose (the
last rank is killed while the others wait for it).
"""
import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from mrl.receiver.mrl_receiver.links import LinkError, Meeting
from mrl.receiver.mrl_receiver.transports import connect

DTYPES = (torch.bfloat16, torch.float32, torch.uint8, torch.int64)
TRANSFERS = 24
OUTSTANDING = 3
LARGE = 64 << 20


def content(seed: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """The same random bytes everywhere, on the host."""
    return torch.randint(256, (numel * dtype.itemsize,), dtype=torch.uint8,
                         generator=torch.Generator().manual_seed(seed)).view(dtype)


class Rank:
    def __init__(self, transport: str, rank: int, world: int, port: int):
        self.transport, self.rank, self.world = transport, rank, world
        self.store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        self.device = torch.device("cpu" if transport == "gloo" else "cuda:0")
        self.deadline = time.monotonic() + 60

    def meet(self, part: str, ranks: range):
        """A communicator of some of the ranks, for those; None for the others."""
        if self.rank not in ranks:
            return None
        return connect(self.transport, Meeting(self.store, "127.0.0.1", f"link/{part}", part, ranks.index(self.rank),
                                               len(ranks), self.device), self.deadline)

    def same(self, flat: torch.Tensor, expected: torch.Tensor) -> bool:
        return torch.equal(flat.cpu().view(torch.uint8), expected.view(torch.uint8))

    def transfers(self) -> dict:
        """Half of the ranks send to the other half, in one mixed order, some transfers ahead of what is awaited."""
        comm, half = self.meet("p2p", range(self.world)), self.world // 2
        under_way, wrong = [], []

        def finish() -> None:
            transfer, flat, number = under_way.pop(0)
            transfer.wait(self.deadline)
            if not self.same(flat, content(number, flat.numel(), flat.dtype)):
                wrong.append(number)

        for number in range(TRANSFERS):
            sender, worker = number * 7 % 5 % half, half + number * 3 % 7 % (self.world - half)
            dtype, numel = DTYPES[number % len(DTYPES)], 1 + 5003 * number
            if self.rank == sender:
                flat = content(number, numel, dtype).to(self.device)
                under_way.append((comm.send(flat, worker, self.deadline), flat, number))
            elif self.rank == worker:
                flat = torch.zeros(numel, dtype=dtype, device=self.device)
                under_way.append((comm.receive(flat, sender, self.deadline), flat, number))
            if len(under_way) > OUTSTANDING:
                finish()
        while under_way:
            finish()
        comm.close()
        return {"wrong": wrong}

    def broadcast(self) -> dict:
        comm, wrong = self.meet("from", range(self.world)), []
        for number, dtype in enumerate(DTYPES):
            expected = content(number, 10007, dtype)
            flat = expected.to(self.device) if self.rank == 0 else torch.zeros_like(expected, device=self.device)
            comm.broadcast(flat, self.deadline).wait(self.deadline)
            if not self.same(flat, expected):
                wrong.append(str(dtype))
        comm.close()
        return {"wrong": wrong}

    def gather(self) -> dict:
        """Among the last 2, 3 … ranks."""
        wrong = []
        for count in range(2, self.world + 1):
            ranks = range(self.world - count, self.world)
            if comm := self.meet(f"node{count}", ranks):
                for number, dtype in enumerate(DTYPES):
                    expected = content(number, count * 3001, dtype)
                    flat, mine = torch.zeros_like(expected, device=self.device), ranks.index(self.rank)
                    flat.chunk(count)[mine].copy_(expected.chunk(count)[mine])
                    comm.all_gather(flat, self.deadline).wait(self.deadline)
                    if not self.same(flat, expected):
                        wrong.append([count, str(dtype)])
                comm.close()
        return {"wrong": wrong}

    def patience(self) -> dict:
        """Rank 0 receives and nobody sends; then it gives up, which the others notice long before their deadline."""
        comm = self.meet("patience", range(self.world))
        return self.fail(comm, lambda flat: comm.receive(flat, (self.rank + 1) % self.world, self.deadline),
                         patience_s=1.0 if self.rank == 0 else 30.0)

    def lose(self) -> dict:
        comm, last = self.meet("lose", range(self.world)), self.world - 1
        if self.rank == last:
            time.sleep(0.5)  # the others are in the middle of it by now
            os.kill(os.getpid(), signal.SIGKILL)
        begin = comm.send if self.rank == 0 else comm.receive
        return self.fail(comm, lambda flat: begin(flat, last, self.deadline), patience_s=30.0)

    def fail(self, comm, begin, patience_s: float) -> dict:
        """Expect a LinkError, and another one at once from the closed communicator."""
        flat = torch.zeros(LARGE, dtype=torch.uint8, device=self.device)
        began = time.monotonic()
        try:
            begin(flat).wait(began + patience_s)
        except LinkError as error:
            seconds = time.monotonic() - began
            comm.close()
            try:
                begin(flat)
            except LinkError as closed:
                return {"error": str(error), "seconds": seconds, "closed": str(closed)}
        raise AssertionError("no LinkError")


def main(transport: str, rank: str, world: str, port: str, scenarios: str) -> None:
    me = Rank(transport, int(rank), int(world), int(port))
    for scenario in scenarios.split(","):
        print(json.dumps(getattr(me, scenario)()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
