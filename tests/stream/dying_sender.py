"""A sender that dies in the middle of a sync. Arguments: link name, push, buckets to send before it dies; the plan in
wire form comes on stdin. Prints the port of its store."""
import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from mrl.receiver.mrl_receiver.gloo import GlooTransport
from mrl.receiver.mrl_receiver.links import Meeting
from mrl.receiver.mrl_receiver.wire import Plan


def main(link: str, push: int, count: int) -> None:
    plan = Plan.from_wire(json.load(sys.stdin))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    store.wait([f"{link}/ready/{push}/0"])
    deadline = time.monotonic() + 60
    transport = GlooTransport(Meeting(store, "127.0.0.1", link, "0", 0, 2, torch.device("cpu")), deadline)
    for bucket in plan.buckets[:count]:
        transport.broadcast(torch.full((bucket.numel,), 0.5), deadline).wait(deadline)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
