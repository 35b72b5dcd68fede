"""Megatron's optimizer in host memory, on a machine whose device is the host."""
from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import Iterator
from unittest import mock

import torch


@contextmanager
def apart_from_the_device() -> Iterator[None]:
    """Within the block parameters pass for the device's, and what `HybridDeviceOptimizer` copies for the host's."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    from mrl.trainer import optimizer

    divide = HybridDeviceOptimizer._get_sub_optimizer_param_groups
    to_float = torch.Tensor.float

    def divided(self: HybridDeviceOptimizer, fraction: float):
        host: list[torch.Tensor] = []

        def on_host(tensor: torch.Tensor) -> torch.Tensor:
            host.append(tensor)
            return tensor

        with mock.patch.multiple(torch.Tensor, pin_memory=on_host, float=lambda tensor: on_host(to_float(tensor)),
                                 is_cuda=property(lambda tensor: not any(tensor is other for other in host))):
            return divide(self, fraction)

    with (mock.patch.object(HybridDeviceOptimizer, "_get_sub_optimizer_param_groups", divided),
          mock.patch.object(optimizer, "OptimizerConfig", partial(optimizer.OptimizerConfig, pin_cpu_grads=False))):
        yield
