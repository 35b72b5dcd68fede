"""gloo as a transport: TCP through host memory. Works everywhere; what lies on a GPU is staged on the host."""
from __future__ import annotations

import time
from typing import Callable, Optional

import torch
import torch.distributed as dist

from .links import (CONNECT_TIMEOUT_S, SENDER_RANK, Label, LinkError, Meeting, PendingAll, address_towards,
                    finish_stream, remaining, words)


class _GlooPending:
    """`host` is what gloo works on: the bytes of `flat`, or a copy that goes back `into` a buffer on a GPU."""

    def __init__(self, work: dist.Work, name: str, host: torch.Tensor, into: torch.Tensor):
        self.work, self.name, self.host, self.into = work, name, host, into

    def wait(self, deadline: float) -> None:
        try:
            self.work.wait(remaining(deadline))
        except RuntimeError as error:
            raise LinkError(f"link {self.name}: {words(error)}") from error
        if self.into.device != self.host.device:
            self.into.copy_(self.host)
            finish_stream(self.into.device)


class GlooTransport:
    """Transfers over TCP. A dead peer shows as a closed socket."""

    def __init__(self, meeting: Meeting, deadline: float):
        """Meets the other ranks. LinkError when they do not come."""
        self.name, self.rank, self.world_size = meeting.name, meeting.rank, meeting.world_size
        options = dist.ProcessGroupGloo._Options()
        options._timeout = remaining(min(deadline, time.monotonic() + CONNECT_TIMEOUT_S))
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address_towards(meeting.host))]
        try:
            self.group = dist.ProcessGroupGloo(dist.PrefixStore(self.name, meeting.store), meeting.rank,
                                               meeting.world_size, options)
        except RuntimeError as error:
            raise LinkError(f"link {self.name} could not be built: {words(error)}") from error

    def broadcast(self, flat: torch.Tensor, deadline: float, label: Optional[Label] = None) -> _GlooPending:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = SENDER_RANK, 0, remaining(deadline)
        return self._begin(lambda group, host: group.broadcast([host], options), flat,
                           incoming=self.rank != SENDER_RANK)

    def send(self, flat: torch.Tensor, peer: int, deadline: float, label: Optional[Label] = None) -> _GlooPending:
        return self._begin(lambda group, host: group.send([host], peer, 0), flat, incoming=False)

    def receive(self, flat: torch.Tensor, peer: int, deadline: float) -> _GlooPending:
        return self._begin(lambda group, host: group.recv([host], peer, 0), flat, incoming=True)

    def all_gather(self, flat: torch.Tensor, deadline: float) -> PendingAll:
        slices = flat.chunk(self.world_size)  # gloo's own all-gather takes the whole of `flat` once more in memory
        peers = [rank for rank in range(self.world_size) if rank != self.rank]
        return PendingAll([*(self.receive(slices[peer], peer, deadline) for peer in peers),
                           *(self.send(slices[self.rank], peer, deadline) for peer in peers)])

    def close(self) -> None:
        if self.group is not None:
            self.group.abort()
            self.group = None

    def _begin(self, start: Callable[[dist.ProcessGroup, torch.Tensor], dist.Work], flat: torch.Tensor,
               incoming: bool) -> _GlooPending:
        """`start` on the bytes of `flat`, which change if `incoming`."""
        if self.group is None:
            raise LinkError(f"link {self.name} is closed")
        data = flat.view(torch.uint8)
        host = data
        if data.device.type != "cpu":
            host = torch.empty(data.shape, dtype=torch.uint8, pin_memory=True) if incoming else data.cpu()
        try:
            return _GlooPending(start(self.group, host), self.name, host, data if incoming else host)
        except RuntimeError as error:
            raise LinkError(f"link {self.name}: {words(error)}") from error
