"""Keeps vLLM's CPU backend from computing with stale weights; never used on GPUs.

Its layers compute from repacked copies made when a model is loaded and drop the original, so weights received later
would never be used. Here they compute from the parameters themselves: slower, but right after every sync.
"""
from __future__ import annotations

from functools import partial
from typing import Any, Callable, Optional

import torch
from torch.nn import functional
from vllm.model_executor.kernels.linear.scaled_mm import cpu as scaled_mm_cpu
from vllm.model_executor.layers import linear, utils
from vllm.model_executor.layers.fused_moe.experts import cpu_moe

_ACTIVATIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda gate: functional.gelu(gate, approximate="tanh"),
}


def keep_plain_weights() -> None:
    """To be called in every worker before its model is built."""
    for module in (utils, linear):
        if hasattr(module, "dispatch_cpu_unquantized_gemm"):
            module.dispatch_cpu_unquantized_gemm = _keep_plain_weight
    scaled_mm_cpu.CPUFp8BlockScaledMMKernel.process_weights_after_loading = _keep_plain_fp8
    cpu_moe.prepare_fp8_moe_layer_for_cpu = _keep_plain_fp8_experts
    cpu_moe.fused_experts_cpu = partial(_with_plain_experts, cpu_moe.fused_experts_cpu)
    cpu_moe.CPUUnquantizedExperts.process_weights_after_loading = _keep_plain_experts
    cpu_moe.CPUUnquantizedExperts.apply = _with_local_experts(cpu_moe.CPUUnquantizedExperts.apply)
    cpu_moe.cpu_fused_moe = fused_experts


def _keep_plain_weight(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = functional.linear


def _keep_plain_fp8(kernel, layer: torch.nn.Module) -> None:
    layer._cpu_skip_gemm_dispatch = True  # then the kernel takes the weight for one that is not packed


def _keep_plain_fp8_experts(w13: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return w13, w2


def _with_plain_experts(fused: Callable[..., None], *arguments: Any) -> None:
    """Call vLLM's `fused_experts_cpu`, whose last argument says whether experts are packed."""
    fused(*arguments[:-1], False)


def _keep_plain_experts(experts, layer: torch.nn.Module) -> None:
    experts._use_zentorch = False


def _with_local_experts(apply: Callable[..., None]) -> Callable[..., None]:
    """An `apply` that numbers experts as this worker holds them, -1 for those of others: vLLM's own forgets to."""
    def applied(experts, *, topk_ids: torch.Tensor, expert_map: Optional[torch.Tensor], **others) -> None:
        if expert_map is not None:
            topk_ids = expert_map[topk_ids.long()]
        apply(experts, topk_ids=topk_ids, expert_map=expert_map, **others)

    return applied


def fused_experts(output: torch.Tensor, hidden: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor,
                  bias13: Optional[torch.Tensor], bias2: Optional[torch.Tensor], weights: torch.Tensor,
                  experts: torch.Tensor, activation: str, isa: str, weighted: bool) -> None:
    """vLLM's `cpu_fused_moe`, in plain torch.

    output, hidden: [tokens, hidden size]; w13: [experts, 2 * intermediate, hidden size], gate above up; w2: [experts,
    hidden size, intermediate]; weights, experts: [tokens, top k], -1: another worker's; weighted: `hidden` carries the
    weights already.
    """
    if activation not in _ACTIVATIONS:
        raise NotImplementedError(f"experts with the activation {activation!r} on the CPU; known are "
                                  f"{', '.join(_ACTIVATIONS)}")
    output.zero_()
    for expert in experts[experts >= 0].unique().tolist():
        tokens, places = (experts == expert).nonzero(as_tuple=True)
        gate, up = functional.linear(hidden[tokens], w13[expert],
                                     None if bias13 is None else bias13[expert]).chunk(2, -1)
        result = functional.linear(_ACTIVATIONS[activation](gate) * up, w2[expert],
                                   None if bias2 is None else bias2[expert])
        if not weighted:
            result = result * weights[tokens, places, None].to(result.dtype)
        output.index_add_(0, tokens, result.to(output.dtype))
