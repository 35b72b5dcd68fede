"""One end of an NCCL link, in a process and on a GPU of its own. Arguments: role, port of the store, scenario.

Prints one JSON line: what happened, and in how many seconds. The sender serves the store and prints its port first.
Scenarios: speed, die-sender, die-receiver, absent (the other end never comes).
"""
import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from mrl.receiver.mrl_receiver.links import LinkError, Meeting, failed_key
from mrl.receiver.mrl_receiver.nccl import NcclTransport

DEVICE = torch.device("cuda", 0)
MIB = 1 << 20
SPEED_MIB, SPEED_ROUNDS = 512, 30


def link(store, rank: int, patience_s: float = 20.0) -> NcclTransport:
    return NcclTransport(Meeting(store, "127.0.0.1", "link", "0", rank, 2, DEVICE), time.monotonic() + patience_s)


def measure(store, rank: int) -> dict:
    transport = link(store, rank)
    flat = torch.empty(SPEED_MIB * MIB, dtype=torch.uint8, device=DEVICE)
    deadline = time.monotonic() + 60
    transport.broadcast(flat, deadline).wait(deadline)
    began = time.monotonic()
    for _ in range(SPEED_ROUNDS):
        transport.broadcast(flat, deadline).wait(deadline)
    seconds = time.monotonic() - began
    return {"gb_per_s": SPEED_ROUNDS * flat.nbytes / seconds / 1e9}


def lose_the_other(store, rank: int, dies: bool) -> dict:
    """One end dies after the first broadcast; the other notices in the middle of the second."""
    transport = link(store, rank)
    flat = torch.empty(256 * MIB, dtype=torch.uint8, device=DEVICE)
    deadline = time.monotonic() + 60
    transport.broadcast(flat, deadline).wait(deadline)
    if dies:
        print("{}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    if rank == 0:  # rank 0 of the gang says so when the gate of a dead engine does
        store.set(failed_key("link"), "1")
    try:
        transport.broadcast(flat, deadline).wait(deadline)
    except LinkError as error:
        transport.close()
        flat.fill_(1)  # the device is still good
        torch.cuda.synchronize()
        return {"error": str(error), "noticed_s": time.monotonic() - began}
    raise AssertionError("the broadcast went through without its peer")


def wait_for_nobody(store, rank: int) -> dict:
    began = time.monotonic()
    try:
        link(store, rank, patience_s=2.0)
    except LinkError as error:
        return {"error": str(error), "noticed_s": time.monotonic() - began}
    raise AssertionError("a communicator of one")


def main(role: str, port: int, scenario: str) -> None:
    rank = 0 if role == "sender" else 1
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    if rank == 0:
        print(store.port, flush=True)
    torch.cuda.set_device(DEVICE)
    if scenario == "speed":
        result = measure(store, rank)
    elif scenario == "absent":
        result = wait_for_nobody(store, rank)
    else:
        result = lose_the_other(store, rank, dies=scenario == f"die-{role}")
    print(json.dumps(result), flush=True)
    if rank == 0:
        sys.stdin.read()  # serve the store until told to end


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
