"""The worker extension for vLLM: `--worker-extension-cls mrl_receiver.vllm.WeightReceiver`.

vLLM mixes WeightReceiver into its worker class, so its methods can be called on every worker by name; they carry a
prefix because they share the worker's namespace. Importing this module, which happens in every worker before its
model is built, also keeps the CPU backend from serving stale weights.
"""
from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers import linear, utils
from vllm.platforms import current_platform

from .answers import answer, make_receiver
from .receive import Receiver


def _keep_plain_weight(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


def _keep_plain_weights() -> None:
    """vLLM's CPU linear layers compute from a repacked copy made at load and drop the original; weights received
    later would never be used. Make them compute from the parameter itself."""
    for module in (utils, linear):
        if hasattr(module, "dispatch_cpu_unquantized_gemm"):
            module.dispatch_cpu_unquantized_gemm = _keep_plain_weight


if current_platform.is_cpu():
    _keep_plain_weights()


class WeightReceiver:
    """Methods added to a vLLM worker: those of `answers.METHODS`, under the same names."""

    def mrl_identity(self) -> dict[str, Any]:
        return answer(self._mrl_receiver, "mrl_identity")

    def mrl_prepare(self, request: str) -> dict[str, Any]:
        return answer(self._mrl_receiver, "mrl_prepare", request)

    def mrl_receive(self, request: str) -> dict[str, Any]:
        return answer(self._mrl_receiver, "mrl_receive", request)

    def mrl_scramble(self, seed: str) -> dict[str, Any]:
        return answer(self._mrl_receiver, "mrl_scramble", seed)

    def _mrl_receiver(self) -> Receiver:
        if "_mrl_receiver_made" not in self.__dict__:
            model = self.model_runner.model
            self._mrl_receiver_made = make_receiver(model, model.load_weights, self.rank,
                                                    self.parallel_config.world_size)
        return self._mrl_receiver_made
