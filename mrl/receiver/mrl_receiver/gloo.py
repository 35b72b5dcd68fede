"""gloo as a transport: TCP through host memory. Works everywhere, for tensors of any device that gloo can stage."""
from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from .links import CONNECT_TIMEOUT_S, SENDER_RANK, LinkError, Meeting, Pending, address_towards, words


class _GlooPending:
    def __init__(self, work: dist.Work, name: str):
        self.work, self.name = work, name

    def wait(self, deadline: float) -> None:
        try:
            self.work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except RuntimeError as error:
            raise LinkError(f"link {self.name}: {words(error)}") from error


class GlooTransport:
    """Broadcasts over TCP. A dead peer shows as a closed socket."""

    def __init__(self, meeting: Meeting, deadline: float):
        """Meets the other ranks. LinkError when they do not come."""
        self.name = meeting.name
        timeout = timedelta(seconds=max(0.001, min(CONNECT_TIMEOUT_S, deadline - time.monotonic())))
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address_towards(meeting.host))]
        try:
            self.group = dist.ProcessGroupGloo(dist.PrefixStore(self.name, meeting.store), meeting.rank,
                                               meeting.world_size, options)
        except RuntimeError as error:
            raise LinkError(f"link {self.name} could not be built: {words(error)}") from error

    def broadcast(self, flat: torch.Tensor, deadline: float) -> Pending:
        if self.group is None:
            raise LinkError(f"link {self.name} is closed")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = SENDER_RANK, 0
        options.timeout = timedelta(seconds=max(0.001, deadline - time.monotonic()))
        try:
            return _GlooPending(self.group.broadcast([flat], options), self.name)
        except RuntimeError as error:
            raise LinkError(f"link {self.name}: {words(error)}") from error

    def close(self) -> None:
        if self.group is not None:
            self.group.abort()
            self.group = None
