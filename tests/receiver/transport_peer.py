"""One rank of some communicators, in a process of its own. Arguments: transport, rank, world size, port of the store,
scenarios separated by commas. Prints one JSON line a scenario: what happened.

Transport host_ipc is cuda_ipc with files mapped into memory for a GPU's buffers. Scenarios: transfers, broadcast,
gather, lend (memory that its owner wants back), lend_and_lose (the borrower is killed), speed, patience (nobody sends),
lose (the last rank is killed while the others wait for it), strangers (the first transfer between two that cannot).
"""
import json
import os
import signal
import sys
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from mrl.receiver.mrl_receiver.cuda_ipc import CudaIpcTransport
from mrl.receiver.mrl_receiver.in_place import InPlace, read
from mrl.receiver.mrl_receiver.links import LinkError, Meeting, finish_stream
from mrl.receiver.mrl_receiver.transports import connect
from mrl.receiver.mrl_receiver.wire import Bucket, Part, Slice

DTYPES = (torch.bfloat16, torch.float32, torch.uint8, torch.int64)
TRANSFERS = 24
OUTSTANDING = 3
LARGE = {"nccl": 1 << 30}
"""Bytes, by transport (else 64 MiB): more than it takes from a sender without a receiver. NCCL's buffers between two
GPUs hold that much by themselves."""
FAST, ROUNDS = 512 << 20, 30
LENT, LENDINGS = (2048, 1 << 16), 3
PATIENCE_S = 240


def content(seed: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """The same random bytes everywhere, on the host."""
    return torch.randint(256, (numel * dtype.itemsize,), dtype=torch.uint8,
                         generator=torch.Generator().manual_seed(seed)).view(dtype)


class HostIpc(CudaIpcTransport):
    """Buffers made by `buffer` are files in a temporary folder."""

    paths: dict[int, str] = {}

    @classmethod
    def buffer(cls, content: torch.Tensor) -> torch.Tensor:
        file = tempfile.NamedTemporaryFile(prefix="mrl-buffer-")
        file.truncate(64 + content.nbytes)
        whole = torch.from_file(file.name, shared=True, size=64 + content.nbytes, dtype=torch.uint8)
        flat = whole[64:].view(content.dtype)
        flat.copy_(content)
        flat.file = file  # removed with the buffer
        cls.paths[whole.data_ptr()] = file.name
        return flat

    def _gpu(self) -> str:
        return "GPU-0"

    def _export(self, storage):
        return [self.paths[storage.data_ptr()], storage.nbytes()]

    def _alias(self, storage):
        return storage

    def _map(self, exported):
        return torch.UntypedStorage.from_file(exported[0], True, exported[1])


class Rank:
    def __init__(self, transport: str, rank: int, world: int, port: int):
        self.transport, self.rank, self.world = transport, rank, world
        self.store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        self.device = torch.device("cuda:0" if transport in ("nccl", "cuda_ipc") else "cpu")
        self.deadline = time.monotonic() + PATIENCE_S

    def meet(self, part: str, ranks: range):
        """A communicator of some of the ranks, for those; None for the others."""
        if self.rank not in ranks:
            return None
        meeting = Meeting(self.store, "127.0.0.1", f"link/{part}", part, ranks.index(self.rank), len(ranks),
                          self.device)
        if self.transport == "host_ipc":
            return HostIpc(meeting, self.deadline)
        return connect(self.transport, meeting, self.deadline)

    def leave(self, comm, part: str, world: int) -> None:
        """Close when everybody is done: closing gives up what others have under way."""
        if self.store.add(f"left/{part}", 1) == world:
            self.store.set(f"left/{part}/all", "1")
        self.store.wait([f"left/{part}/all"], timedelta(seconds=PATIENCE_S))
        comm.close()

    def buffer(self, content: torch.Tensor) -> torch.Tensor:
        return HostIpc.buffer(content) if self.transport == "host_ipc" else content.to(self.device)

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
                flat = self.buffer(content(number, numel, dtype))
                under_way.append((comm.send(flat, worker, self.deadline), flat, number))
            elif self.rank == worker:
                flat = torch.zeros(numel, dtype=dtype, device=self.device)
                under_way.append((comm.receive(flat, sender, self.deadline), flat, number))
            if len(under_way) > OUTSTANDING:
                finish()
        while under_way:
            finish()
        self.leave(comm, "p2p", self.world)
        return {"wrong": wrong}

    def broadcast(self) -> dict:
        comm, wrong = self.meet("from", range(self.world)), []
        for number, dtype in enumerate(DTYPES):
            expected = content(number, 10007, dtype)
            flat = self.buffer(expected) if self.rank == 0 else torch.zeros_like(expected, device=self.device)
            comm.broadcast(flat, self.deadline).wait(self.deadline)
            if not self.same(flat, expected):
                wrong.append(str(dtype))
        self.leave(comm, "from", self.world)
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
                self.leave(comm, f"node{count}", count)
        return {"wrong": wrong}

    def lend(self) -> dict:
        """Rank 0 lends rank 1 a tensor in two halves that lie in place, and takes back the memory after each time."""
        comm = self.meet("lend", range(2))
        if comm is None:
            return {}
        outcomes = [self._lend_once(comm, number) for number in range(LENDINGS)]
        self.leave(comm, "lend", 2)
        return {"outcomes": outcomes}

    def lend_and_lose(self) -> dict:
        """Rank 1 is killed with the memory that rank 0 has lent it."""
        comm = self.meet("lend_and_lose", range(2))
        if comm is None:
            return {}
        tensor = self.buffer(content(1, LENT[0] * LENT[1], torch.bfloat16)).view(LENT)
        if self.rank == 1:
            lent = comm.borrow(tensor.nbytes, 0, self.deadline).wait(self.deadline)
            assert lent.storages[0].nbytes() >= tensor.nbytes
            os.kill(os.getpid(), signal.SIGKILL)
        finish_stream(self.device)
        held = InPlace([Part("t", LENT, ((0, LENT[0]), (0, LENT[1])), 0)], [tensor])
        try:
            comm.lend(held, 1, self.deadline).wait(self.deadline)
        except LinkError as error:
            comm.close()
            return {"error": str(error), "returned": self._give_up(tensor)}
        raise AssertionError("no LinkError")

    def _give_up(self, tensor: torch.Tensor) -> int:
        """The bytes that come free on the GPU, once a killed process has let go, too."""
        if self.device.type == "cpu":
            return tensor.nbytes
        before, size, deadline = torch.cuda.mem_get_info()[0], tensor.nbytes, time.monotonic() + 20
        tensor.untyped_storage().resize_(0)
        torch.cuda.empty_cache()
        while (free := torch.cuda.mem_get_info()[0] - before) < size and time.monotonic() < deadline:
            time.sleep(0.05)
        return free

    def _lend_once(self, comm, number: int) -> object:
        """Rank 0: the bytes that it got back of its GPU; rank 1: whether the right ones came."""
        rows, columns = LENT
        expected = content(number, rows * columns, torch.bfloat16).view(LENT)
        done = f"lend/{number}"
        if self.rank == 0:
            tensor = self.buffer(expected.view(-1)).view(LENT)
            halves = [((0, rows), (0, columns // 2)), ((0, rows), (columns // 2, columns))]
            held = InPlace([Part("t", LENT, box, 0) for box in halves], tensor.chunk(2, dim=1))
            finish_stream(self.device)
            comm.lend(held, 1, self.deadline).wait(self.deadline)
            comm.let_go()
            self.store.wait([done], timedelta(seconds=PATIENCE_S))
            return self._give_up(tensor)
        lent = comm.borrow(expected.nbytes, 0, self.deadline).wait(self.deadline)
        whole = Part("t", LENT, ((0, rows), (0, columns)), 0)
        bucket = Bucket(0, "bfloat16", "broadcast", None, whole.numel, (Slice(0, whole.numel, (whole,)),))
        right = True
        for part, values in read(lent.description, bucket, lent.storages):
            right &= self.same(values.contiguous(), expected[tuple(slice(*span) for span in part.box)].contiguous())
        lent.give_back()
        del lent, values
        comm.let_go()
        self.store.set(done, "1")
        return right

    def speed(self) -> dict:
        """Rank 0 sends one buffer to rank 1 again and again, each time waited for."""
        comm = self.meet("speed", range(2))
        if comm is None:
            return {}
        flat = self.buffer(torch.zeros(FAST, dtype=torch.uint8))
        began = 0.0
        for _ in range(1 + ROUNDS):
            transfer = comm.send(flat, 1, self.deadline) if self.rank == 0 else comm.receive(flat, 0, self.deadline)
            transfer.wait(self.deadline)
            began = began or time.monotonic()  # when all is set up
        seconds = time.monotonic() - began
        self.leave(comm, "speed", 2)
        return {"gb_per_s": ROUNDS * flat.nbytes / seconds / 1e9}

    def patience(self) -> dict:
        """Nobody sends. Rank 0 runs out of time and gives up; the others notice, long before their time is over."""
        comm = self.meet("patience", range(self.world))
        return self.fail(comm, lambda flat, deadline: comm.receive(flat, (self.rank + 1) % self.world, deadline),
                         patience_s=1.0 if self.rank == 0 else 30.0)

    def lose(self) -> dict:
        """Rank 0 sends to the last rank, which sends to those between; the second time it is dead."""
        comm, last = self.meet("lose", range(self.world)), self.world - 1
        begin = comm.send if self.rank == 0 else comm.receive
        small = self.buffer(torch.ones(8))
        if self.rank == last:
            comm.receive(small, 0, self.deadline).wait(self.deadline)
            for peer in range(1, last):
                comm.send(small, peer, self.deadline).wait(self.deadline)
            time.sleep(0.5)  # the others are in the middle of the next by now
            os.kill(os.getpid(), signal.SIGKILL)
        begin(small, last, self.deadline).wait(self.deadline)
        return self.fail(comm, lambda flat, deadline: begin(flat, last, deadline), patience_s=30.0)

    def strangers(self) -> dict:
        """Rank 0 sends to rank 1, which is on another GPU; with host_ipc, says it is."""
        comm = self.meet("strangers", range(2))
        if comm is None:
            return {}
        if self.transport == "host_ipc":
            comm.gpu = f"GPU-{self.rank}"
        begin, peer = [(comm.send, 1), (comm.receive, 0)][self.rank]
        return self.fail(comm, lambda flat, deadline: begin(flat, peer, deadline), patience_s=30.0)

    def fail(self, comm, begin, patience_s: float) -> dict:
        """Expect a LinkError, and another one at once from the closed communicator."""
        flat = self.buffer(torch.zeros(LARGE.get(self.transport, 64 << 20), dtype=torch.uint8))
        began = time.monotonic()
        deadline = began + patience_s
        try:
            begin(flat, deadline).wait(deadline)
            if reason := comm.meeting.given_up():  # what came is of no use, then
                raise LinkError(reason)
        except LinkError as error:
            seconds = time.monotonic() - began
            comm.close()
            try:
                begin(flat, deadline)
            except LinkError as closed:
                return {"error": str(error), "seconds": seconds, "closed": str(closed)}
        raise AssertionError("no LinkError")


def main(transport: str, rank: str, world: str, port: str, scenarios: str) -> None:
    me = Rank(transport, int(rank), int(world), int(port))
    for scenario in scenarios.split(","):
        print(json.dumps(getattr(me, scenario)()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
