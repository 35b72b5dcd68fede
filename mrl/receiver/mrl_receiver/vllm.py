"""The worker extension for vLLM: `--worker-extension-cls mrl_receiver.vllm.WeightReceiver`.

vLLM mixes WeightReceiver into its worker class, so its methods can be called on every worker by name; they carry a
prefix because they share the worker's namespace. Importing this module, which happens in every worker before its
model is built, also sees to it that what vLLM does with loaded weights is watched, and keeps the CPU backend from
serving stale ones.

What is particular to vLLM's releases (0.26 … 0.32) is here: the names of a worker's attributes, the place where all
models are processed after loading, and the tensors that are derived from weights.
"""
from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.model_loader import base_loader
from vllm.platforms import current_platform

from .answers import answer, make_receiver
from .receive import Receiver
from .watch import keeping_parameters, require_plain, seen_of, watched

REMEDY = "for experts, add '--moe-backend=triton' to rollout.args, for fp8 VLLM_USE_DEEP_GEMM: '0' to rollout.env"


def watch_processing() -> None:
    """Have everything watched that vLLM does to a model in this process between loading its weights and serving."""
    usual = base_loader.process_weights_after_loading

    def process(model: torch.nn.Module, *arguments: Any, **keywords: Any) -> None:
        for layer in model.modules():
            if isinstance(method := getattr(layer, "quant_method", None), BaseKVCacheMethod):
                method.process_weights_after_loading(layer)  # scales of the cache, no weights; not done again
        watched(lambda: usual(model, *arguments, **keywords), model)

    base_loader.process_weights_after_loading = process


def keep_parameters(method: type) -> None:
    """Have a quantisation method leave layers the parameters that they were loaded with, where it moves no memory."""
    usual = method.process_weights_after_loading

    def process(self: Any, layer: torch.nn.Module) -> None:
        keeping_parameters(lambda: usual(self, layer), layer)

    method.process_weights_after_loading = process


watch_processing()
for quantised in (Fp8LinearMethod, Fp8MoEMethod):
    keep_parameters(quantised)
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

    def mrl_forget(self) -> dict[str, Any]:
        return answer(self._mrl_receiver, "mrl_forget")

    def mrl_scramble(self, seed: str) -> dict[str, Any]:
        return answer(self._mrl_receiver, "mrl_scramble", seed)

    def mrl_fingerprint(self) -> dict[str, Any]:
        return answer(self._mrl_receiver, "mrl_fingerprint")

    def _mrl_receiver(self) -> Receiver:
        if "_mrl_receiver_made" not in self.__dict__:
            model = self.model_runner.get_model()
            attention = deriving_attention(model)

            def refresh() -> None:
                with set_current_vllm_config(self.vllm_config):
                    for layer in attention.values():
                        absorb(layer, self.model_config.dtype)

            require_plain({"": seen_of(model)}, model, refresh, REMEDY)
            derived = {f"{name}.{key}" for name, layer in attention.items()
                       for key, _ in layer.named_parameters(recurse=False)}
            self._mrl_receiver_made = make_receiver(model, model.load_weights, self.rank,
                                                    self.parallel_config.world_size, refresh, derived)
        return self._mrl_receiver_made


def deriving_attention(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The attention layers, by name, that compute from what they made of their weights after loading: products of them
    (MLA), or sinks in another dtype (FlashInfer)."""
    return {name: module for name, module in model.named_modules()
            if callable(getattr(module, "process_weights_after_loading", None))
            and (hasattr(module, "kv_b_proj")
                 or getattr(getattr(module, "impl", None), "_sinks_source", None) is not None)}


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
