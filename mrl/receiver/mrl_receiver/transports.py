"""The transports there are, by the name that `sync.transport` and a sync request give them."""
from __future__ import annotations

import torch

from .cuda_ipc import CudaIpcTransport
from .disk import DiskTransport
from .gloo import GlooTransport
from .links import Gathering, Meeting, Transport
from .nccl import NcclTransport

TRANSPORTS = {"gloo": GlooTransport, "nccl": NcclTransport, "cuda_ipc": CudaIpcTransport, "disk": DiskTransport}
GATHERING = ("gloo", "nccl")
LENDING = ("cuda_ipc",)


def connect(transport: str, meeting: Meeting, deadline: float) -> Transport:
    """Build one communicator, together with its other ranks. LinkError when one of them stays away."""
    return TRANSPORTS[transport](meeting, deadline)


def connect_workers(transport: str, meeting: Meeting, deadline: float) -> Gathering:
    """Build the communicator of an engine node's workers alone, in a link that uses `transport`. LinkError."""
    return connect(gathering(transport, meeting.device), meeting, deadline)


def gathering(transport: str, device: torch.device) -> str:
    """What joins slices among workers where weights come by `transport`: each worker has a device of its own."""
    if transport in GATHERING:
        return transport
    return "nccl" if device.type == "cuda" else "gloo"
