"""The transports there are, by the name that `sync.transport` and a sync request give them."""
from __future__ import annotations

from .gloo import GlooTransport
from .links import Meeting, Transport
from .nccl import NcclTransport

TRANSPORTS = {"gloo": GlooTransport, "nccl": NcclTransport}


def connect(transport: str, meeting: Meeting, deadline: float) -> Transport:
    """Build one communicator, together with its other ranks. LinkError when one of them stays away."""
    return TRANSPORTS[transport](meeting, deadline)
