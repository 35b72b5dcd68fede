"""The worker extension for vLLM: `--worker-extension-cls mrl_receiver.vllm.WeightReceiver`.

vLLM mixes WeightReceiver into its worker class, so its methods can be called on every worker by name; they carry a
prefix because they share the worker's namespace. Importing this module, which happens in every worker before its
model is built, also keeps the CPU backend from serving stale weights.
"""
from __future__ import annotations

import logging
import os
import traceback
from functools import wraps
from typing import Any, Callable

import torch
from vllm.model_executor.layers import linear, utils
from vllm.platforms import current_platform

from .receive import Receiver
from .wire import SyncRequest

logger = logging.getLogger(__name__)


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


def _answering(method: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Errors become answers: one that left a worker would end the whole server."""

    @wraps(method)
    def answer(self, *arguments: Any) -> dict[str, Any]:
        try:
            return {"error": None, **method(self, *arguments)}
        except Exception as error:
            logger.error("%s failed\n%s", method.__name__, traceback.format_exc())
            return {"error": f"{type(error).__name__}: {error}"}

    return answer


class WeightReceiver:
    """Methods added to a vLLM worker. Arguments and answers are JSON; "error" is None or says what failed."""

    @_answering
    def mrl_identity(self) -> dict[str, Any]:
        """Who this worker is: run id, engine index, incarnation, all as given at start."""
        receiver = self._mrl_receiver()
        return {"run_id": receiver.run_id, "engine": receiver.engine, "incarnation": receiver.incarnation,
                "worker": receiver.worker}

    @_answering
    def mrl_prepare(self, request: str) -> dict[str, Any]:
        """Receiver.prepare of a SyncRequest in JSON."""
        return self._mrl_receiver().prepare(SyncRequest.from_json(request))

    @_answering
    def mrl_prove(self, request: str) -> dict[str, Any]:
        """Receiver.prove of a SyncRequest in JSON."""
        return self._mrl_receiver().prove(SyncRequest.from_json(request))

    @_answering
    def mrl_receive(self, request: str) -> dict[str, Any]:
        """Receiver.receive of a SyncRequest in JSON."""
        return self._mrl_receiver().receive(SyncRequest.from_json(request))

    @_answering
    def mrl_scramble(self, seed: str) -> dict[str, Any]:
        """Receiver.scramble, for tests."""
        self._mrl_receiver().scramble(int(seed))
        return {}

    def _mrl_receiver(self) -> Receiver:
        if "_mrl_receiver_made" not in self.__dict__:
            model = self.model_runner.model
            self._mrl_receiver_made = Receiver(
                model, model.load_weights, os.environ["MRL_RUN_ID"], int(os.environ["MRL_ENGINE"]),
                int(os.environ["MRL_INCARNATION"]), self.rank, self.parallel_config.world_size)
        return self._mrl_receiver_made
