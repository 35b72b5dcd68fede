"""The network between trainers and engines as far as plans and their simulation care. Pure data."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Network:
    """Bandwidths in GB/s (10^9 bytes a second) and one direction, as a message reaches them; latency in seconds.

    `gpus_per_node`: of the trainers' nodes; the engines' nodes are described by `EngineLayout`.
    `nic_gb_s`: of the network interface that each GPU has to itself. A node's shared interface is described by its
    share for one GPU.
    `nvlink_gb_s`: of one GPU to the others of its node.
    `latency_s`: what a message costs besides its bytes.
    """

    gpus_per_node: int = 8
    nic_gb_s: float = 50.0
    nvlink_gb_s: float = 400.0
    latency_s: float = 30e-6

    def __post_init__(self) -> None:
        for name in ("gpus_per_node", "nic_gb_s", "nvlink_gb_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"network: {name} is {getattr(self, name)}, but must be above 0")
        if self.latency_s < 0:
            raise ValueError(f"network: latency_s is {self.latency_s}, but must not be negative")
