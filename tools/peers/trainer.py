"""The trainer's side of the comparisons: a raw broadcast, and syncs tensor by tensor."""
from __future__ import annotations

import json
import time
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Mapping

import torch
import torch.distributed as dist

from mrl.reshard.pieces import Shape

from .group import TIMEOUT, finish, join_group

HOST = "127.0.0.1"
RAW_BYTES = 1 << 30
"""The largest message of a raw broadcast."""


class PeerTrainer:
    """Rank 0 alone, with the whole of every HF tensor; the engine at `url` has `worker.PeerReceiver`.

    Every method that measures returns seconds.
    """

    def __init__(self, url: str, shapes: Mapping[str, Shape], device: torch.device, workers: int):
        self.url, self.device, self.calls = url, device, ThreadPoolExecutor(1)
        self.tensors = {name: torch.zeros(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()}
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self.raw_buffer = torch.zeros(min(self.nbytes, RAW_BYTES), dtype=torch.uint8, device=device)
        self.store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        meeting = {"backend": "nccl" if device.type == "cuda" else "gloo", "host": HOST, "port": self.store.port,
                   "world_size": 1 + workers}
        joined = self._call("peer_join", meeting)
        self.group = join_group(rank=0, **meeting)
        joined.result()

    def raw(self) -> float:
        """The same bytes in as few messages as can be: no names, no loading, no call of the engine in the time."""
        sizes = [len(self.raw_buffer)] * (self.nbytes // len(self.raw_buffer))
        sizes += [rest] if (rest := self.nbytes % len(self.raw_buffer)) else []
        received = self._call("peer_raw", sizes)
        self.group.barrier().wait()
        began = time.perf_counter()
        for size in sizes:
            self.group.broadcast([self.raw_buffer[:size]]).wait()
        finish(self.device)
        self.group.barrier().wait()
        seconds = time.perf_counter() - began
        received.result()
        return seconds

    def per_tensor(self) -> float:
        """A call of the engine for every tensor, as vLLM's example of RLHF and those that follow it do."""
        return self._load([[name] for name in self.tensors])

    def per_tensor_one_call(self) -> float:
        """The same, but the engine is told of all tensors at once."""
        return self._load([list(self.tensors)])

    def _load(self, calls: list[list[str]]) -> float:
        began = time.perf_counter()
        for names in calls:
            loaded = self._call("peer_load", [[name, "bfloat16", list(self.tensors[name].shape)] for name in names])
            for name in names:
                self.group.broadcast([self.tensors[name]]).wait()
            loaded.result()
        return time.perf_counter() - began

    def _call(self, method: str, argument: object) -> Future:
        body = json.dumps({"method": method, "args": [json.dumps(argument)]}).encode()
        request = urllib.request.Request(f"{self.url}/collective_rpc", body, {"Content-Type": "application/json"})

        def post() -> bytes:
            with urllib.request.urlopen(request, timeout=TIMEOUT.total_seconds()) as answer:
                return answer.read()

        return self.calls.submit(post)
