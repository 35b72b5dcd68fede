"""Starts SGLang's server on a CPU. See this folder's `__init__.py` for why SGLang's own module is not enough.

Every process that SGLang spawns runs this file again (as `__mp_main__`), so what is set up here holds in all of them.
"""
import importlib.util
import os
import runpy

import torch

_WORD = 0xFFFFFFFF
_LENGTH = 16  # bytes hashed: a seed of 8, a position of 4, a column of 4


def _rotate(value: torch.Tensor, bits: int) -> torch.Tensor:
    return (value << bits | value >> 32 - bits) & _WORD


def _mix(state: torch.Tensor | int, block: torch.Tensor) -> torch.Tensor:
    block = _rotate((block & _WORD) * 0xCC9E2D51 & _WORD, 15) * 0x1B873593 & _WORD
    return _rotate(state ^ block, 13) * 5 + 0xE6546B64 & _WORD


def murmur_hash32(seeds: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (x86, 32 bits) of (seed, position, column): int64[len(seeds), len(columns)], values below 2^32.

    All 1-D; seeds: 64-bit integers; positions: as many; the numbers that SGLang's Triton kernel gives.
    """
    seeds, positions, columns = seeds.view(torch.int64)[:, None], positions.long()[:, None], columns.long()[None]
    state = 0
    for block in (seeds, seeds >> 32, positions, columns):
        state = _mix(state, block)  # int64 products wrap around, which leaves their lower 32 bits right
    state = state ^ _LENGTH
    state = (state ^ state >> 16) * 0x85EBCA6B & _WORD
    state = (state ^ state >> 13) * 0xC2B2AE35 & _WORD
    return state ^ state >> 16


def without_others_experts(forward, layer: torch.nn.Module, hidden: torch.Tensor, chosen, config) -> torch.Tensor:
    """Around SGLang's experts in torch, which know no others than a worker's own: those of other workers (-1) count as
    its first one, with weight 0. chosen: a named tuple with topk_ids and topk_weights, [tokens, top k].

    One choice of each token at a time, because no token may have an expert twice.
    """
    away = chosen.topk_ids < 0
    if not away.any():
        return forward(layer, hidden, chosen, config)
    ids, weights = chosen.topk_ids.masked_fill(away, 0), chosen.topk_weights.masked_fill(away, 0.0)
    return sum(forward(layer, hidden, chosen._replace(topk_ids=ids[:, [k]], topk_weights=weights[:, [k]]), config)
               for k in range(ids.shape[1]))


def not_page_locked(*_args, **_keywords) -> None:
    """In place of page-locking host memory (which SGLang keeps the chosen experts in) for copies from a GPU."""


def absorbed_for_torch(get_handler, registry, backend: str):
    """Around SGLang's choice of how to compute MLA. The way that it takes for prompts by default does not fit the cache
    of attention in torch, which holds latents; the one with absorbed weights does."""
    if backend != "torch_native":
        return get_handler(registry, backend)
    from sglang.srt.models.deepseek_common.attention_forward_methods import AttnForwardMethod

    return lambda *_: AttnForwardMethod.MLA


def stand_in() -> None:
    """In this process, declare torchvision's operators where its own do not load, and put torch code in place of what
    does not work on a CPU."""
    folder = next(iter(importlib.util.find_spec("torchvision").submodule_search_locations))
    try:
        torch.ops.load_library(os.path.join(folder, "_C.so"))
    except OSError:
        for name in ("torchvision::nms", "torchvision::qnms"):
            torch.library.define(name, "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.layers.sampler.murmur_hash32", murmur_hash32, HookType.REPLACE)
    HookRegistry.register("sglang.srt.layers.moe.fused_moe_native.moe_forward_native", without_others_experts,
                          HookType.AROUND)
    HookRegistry.register("sglang.srt.mem_cache.pool_host.common._cuda_host_register", not_page_locked,
                          HookType.REPLACE)
    HookRegistry.register(
        "sglang.srt.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry.get_handler",
        absorbed_for_torch, HookType.AROUND)


if __name__ in ("__main__", "__mp_main__"):
    stand_in()
if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
