"""The trainer's side of the comparisons: a raw broadcast or copy, and syncs tensor by tensor. For rank 0 alone.

Methods that measure return seconds.
"""
from __future__ import annotations

import json
import time
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Mapping, Sequence

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mrl.reshard.pieces import Shape

from .group import TIMEOUT, backend_of, finish, join_group

HOST = "127.0.0.1"
RAW_BYTES = 1 << 30
"""The largest message of a raw broadcast."""


def serve(name: str, device: torch.device, receivers: int) -> tuple[dist.TCPStore, dict[str, Any]]:
    """A store, to be kept, and the arguments of `join_group`, less the rank, for a trainer and its receivers."""
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    return store, {"name": name, "backend": backend_of(device), "host": HOST, "port": store.port,
                   "world_size": 1 + receivers}


class RawBroadcast:
    """`nbytes` in as few messages as can be, into processes on `devices` that do nothing else, `rounds` times."""

    def __init__(self, nbytes: int, device: torch.device, devices: Sequence[torch.device], rounds: int):
        self.device, self.sizes = device, [RAW_BYTES] * (nbytes // RAW_BYTES)
        self.sizes += [rest] if (rest := nbytes % RAW_BYTES) else []
        self.buffer = torch.zeros(max(self.sizes), dtype=torch.uint8, device=device)
        self.store, meeting = serve("raw", device, len(devices))
        context = mp.get_context("spawn")
        self.receivers = [context.Process(target=_receive_raw, args=(1 + index, one, self.sizes, rounds, meeting),
                                          daemon=True) for index, one in enumerate(devices)]
        for receiver in self.receivers:
            receiver.start()
        self.groups = _join_raw(0, meeting)

    def push(self) -> float:
        return _pass_on(*self.groups, self.buffer, self.sizes)


class DeviceCopy:
    """`nbytes` copied from one place in the memory of `device` to another, in pieces as large as a raw broadcast's."""

    def __init__(self, nbytes: int, device: torch.device):
        self.nbytes, self.device = nbytes, device
        self.source, self.target = torch.zeros(2, min(nbytes, RAW_BYTES), dtype=torch.uint8, device=device)

    def push(self) -> float:
        finish(self.device)
        began = time.perf_counter()
        for start in range(0, self.nbytes, len(self.source)):
            size = min(len(self.source), self.nbytes - start)
            self.target[:size].copy_(self.source[:size])
        finish(self.device)
        return time.perf_counter() - began


def _receive_raw(rank: int, device: torch.device, sizes: Sequence[int], rounds: int, meeting: dict) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    groups = _join_raw(rank, meeting)
    buffer = torch.empty(max(sizes), dtype=torch.uint8, device=device)
    for _ in range(rounds):
        _pass_on(*groups, buffer, sizes)


def _join_raw(rank: int, meeting: dict[str, Any]) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """One group for the bytes, and one to meet in: a receiver that waited in NCCL would keep its GPU busy meanwhile,
    while others are timed there."""
    meet = {**meeting, "name": f"{meeting['name']}, meeting", "backend": "gloo"}
    return join_group(rank=rank, **meeting), join_group(rank=rank, **meet)


def _pass_on(group: dist.ProcessGroup, meet: dist.ProcessGroup, buffer: torch.Tensor, sizes: Sequence[int]) -> float:
    """One raw broadcast, from when all are there until all are done."""
    meet.barrier().wait()
    began = time.perf_counter()
    for size in sizes:
        group.broadcast([buffer[:size]]).wait()
    finish(buffer.device)
    meet.barrier().wait()
    return time.perf_counter() - began


class PerTensor:
    """Whole HF tensors of these shapes, one at a time, to the vLLM server at `url` with `worker.PeerReceiver`."""

    def __init__(self, url: str, shapes: Mapping[str, Shape], device: torch.device, workers: int):
        self.url, self.calls = url, ThreadPoolExecutor(1)
        self.tensors = {name: torch.zeros(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()}
        self.store, meeting = serve("per tensor", device, workers)
        joined = self._call("peer_join", meeting)
        self.group = join_group(rank=0, **meeting)
        joined.result()

    def push(self) -> float:
        """With a call of the engine for every tensor, as vLLM's example of RLHF and those that follow it do."""
        return self._load([[name] for name in self.tensors])

    def push_in_one_call(self) -> float:
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
