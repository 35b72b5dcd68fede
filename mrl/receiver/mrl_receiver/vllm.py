"""The worker extension for vLLM: `--worker-extension-cls mrl_receiver.vllm.WeightReceiver`.

vLLM mixes WeightReceiver into its worker class, so its methods can be called on every worker by name; they carry a
prefix because they share the worker's namespace. Importing this module, which happens in every worker before its
model is built, also keeps the CPU backend from serving stale weights.

What is particular to vLLM's releases (0.26 … 0.32) is here: the names of a worker's attributes, the tensors that are
derived from weights, and the layouts of experts that a sync cannot write to.
"""
from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator

import torch
from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform

from .answers import answer, make_receiver
from .receive import Receiver

PLAIN_EXPERTS = {"TRITON", "BATCHED_TRITON", "CPU"}
"""MoE backends that compute from the weights as they were loaded; others rearrange them once, after loading."""

if current_platform.is_cpu():
    from .vllm_cpu import keep_plain_weights

    keep_plain_weights()


class WeightReceiver:
    """Methods added to a vLLM worker: those of `answers.METHODS`, under the same names."""

    def mrl_identity(self) -> dict[str, Any]:
        return answer(self._mrl_receiver, "mrl_identity")

    def mrl_prepare(self, request: str) -> dict[str, Any]:
        return answer(self._mrl_receiver, "mrl_prepare", request)

    def mrl_prove(self, request: str) -> dict[str, Any]:
        return answer(self._mrl_receiver, "mrl_prove", request)

    def mrl_receive(self, request: str) -> dict[str, Any]:
        return answer(self._mrl_receiver, "mrl_receive", request)

    def mrl_scramble(self, seed: str) -> dict[str, Any]:
        return answer(self._mrl_receiver, "mrl_scramble", seed)

    def _mrl_receiver(self) -> Receiver:
        if "_mrl_receiver_made" not in self.__dict__:
            model = self.model_runner.get_model()
            require_plain_experts(model)
            attention = absorbing_attention(model)

            def refresh() -> None:
                with set_current_vllm_config(self.vllm_config):
                    for layer in attention.values():
                        absorb(layer, self.model_config.dtype)

            derived = {f"{name}.{key}" for name, layer in attention.items()
                       for key, _ in layer.named_parameters(recurse=False)}
            self._mrl_receiver_made = make_receiver(model, model.load_weights, self.rank,
                                                    self.parallel_config.world_size, refresh, derived)
        return self._mrl_receiver_made


def require_plain_experts(model: torch.nn.Module) -> None:
    """RuntimeError when expert weights are not where vLLM's loader puts them."""
    for name, module in model.named_modules():
        backend = getattr(getattr(module, "quant_method", None), "unquantized_backend", None)
        if backend is not None and backend.name not in PLAIN_EXPERTS:
            raise RuntimeError(f"{name}: vLLM's MoE backend {backend.name} rearranges experts' weights after loading, "
                               "so that a sync cannot reach them; add '--moe-backend=triton' to rollout.args")


def absorbing_attention(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The attention layers, by name, that compute from products of their weights made after loading (MLA)."""
    return {name: module for name, module in model.named_modules()
            if hasattr(module, "kv_b_proj") and callable(getattr(module, "process_weights_after_loading", None))}


def absorb(layer: torch.nn.Module, dtype: torch.dtype) -> None:
    """Make a layer's derived tensors anew, in the memory that captured CUDA graphs know."""
    with _memory_kept(layer), _memory_kept(layer.impl):
        layer.process_weights_after_loading(dtype)


@contextmanager
def _memory_kept(owner: Any) -> Iterator[None]:
    """Within the block `owner` may replace its tensors; afterwards the old ones are back, with the new values."""
    before = {key: value for key, value in [*vars(owner).items(), *vars(owner).get("_parameters", {}).items()]
              if isinstance(value, torch.Tensor)}
    yield
    for key, old in before.items():
        new = getattr(owner, key, None)
        if isinstance(new, torch.Tensor) and new is not old and new.shape == old.shape:
            old.copy_(new)
            setattr(owner, key, old)
