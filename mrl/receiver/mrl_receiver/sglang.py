"""The plugin for SGLang: it is found through mrl_receiver.dist-info, and `register` runs in all of SGLang's processes.

A call reaches every worker by the one route that SGLang has for it: a request to /update_weights_from_tensor goes to
the scheduler of each worker, between two batches. One whose load_format is "mrl" is answered here instead; the answers
of all workers travel in the message of the first one's. (SGLang's own update session, which newer releases demand
around such requests, is passed by: it prepares SGLang's loader, and a Receiver writes to the parameters itself.)

The plugin watches what SGLang does with weights after loading them, by the methods that are known to leave them alone
as a rule; a layer with another one is refused. It also makes SGLang use a request's sampling seed: by itself SGLang
does so only in its deterministic mode, which costs speed and the prefix cache for more than we need. It has work on the
GPU end before a sleep, and clears what is read after one before it is written. A scheduler without requests goes round
and round and lets another thread of its process run only every few milliseconds; it is made to do so more often, for
the thread that begins a sync.
"""
from __future__ import annotations

import json
import sys
from typing import Any, Callable, Optional

import torch
import torch.distributed as dist

from .answers import answer, make_receiver
from .receive import Receiver
from .watch import require_plain, seen_of, watched

LOAD_FORMAT = "mrl"
PLAIN_METHODS = ("unquant.UnquantizedLinearMethod", "unquant.UnquantizedEmbeddingMethod",
                 "unquant.UnquantizedFusedMoEMethod", "fp8.Fp8LinearMethod", "fp8.Fp8MoEMethod")
"""Classes of layers' methods whose kernels read the layer's parameters, unless they rearrange them after loading."""
REMEDY = "for experts, add '--moe-runner-backend=triton' to rollout.args, for fp8 '--fp8-gemm-backend=triton'"
CACHE_SCALES = ("k_scale", "v_scale")
"""Attributes of attention layers, which have no weights."""
NO_SEED = 0
SWITCH_S = 2e-4
"""How long Python lets a thread run while another wants to."""
_RECEIVER = "mrl_receiver"


def register() -> None:
    """Called by SGLang before it builds anything."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    updater = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    HookRegistry.register(f"{updater}.update_weights_from_tensor", answer_call, HookType.AROUND)
    HookRegistry.register(f"{updater}.release_memory_occupation", finish_work, HookType.BEFORE)
    HookRegistry.register(f"{updater}.resume_memory_occupation", clear_table, HookType.AFTER)
    HookRegistry.register(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch", seed_batch, HookType.AFTER)
    for method in PLAIN_METHODS:
        HookRegistry.register(f"sglang.srt.layers.quantization.{method}.process_weights_after_loading",
                              watch_layer, HookType.AROUND)


def answer_call(update: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Around a scheduler's update_weights_from_tensor: answer if it is one of mrl's calls, together with the others."""
    if request.load_format != LOAD_FORMAT:
        return update(updater, request)
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqOutput

    call = json.loads(bytes(request.serialized_named_tensors[0]))
    answers: list[Optional[dict]] = [None] * dist.get_world_size(updater.tp_cpu_group)
    mine = answer(lambda: _receiver_of(updater), call["method"], call["argument"])
    dist.all_gather_object(answers, mine, updater.tp_cpu_group)  # also keeps the workers from going on alone
    return UpdateWeightsFromTensorReqOutput(success=True, message=json.dumps(answers))


def finish_work(*_: Any, **__: Any) -> None:
    """Before a scheduler's release_memory_occupation, which unmaps memory at once: a scheduler that runs ahead of its
    results has started one step more than it needed, and on a GPU that others use, too, that may still be under way."""
    torch.get_device_module().synchronize()


def clear_table(result: Any, updater: Any, request: Any) -> Any:
    """After a scheduler's resume_memory_occupation: the cache's table of places has been made of zeros, and is of
    anything when it comes back; CUDA graphs read its first row for the requests that are missing in a batch."""
    if "kv_cache" in request.tags:
        updater.tp_worker.model_runner.req_to_token_pool.req_to_token.zero_()
    return result


def watch_layer(process: Callable[..., None], method: Any, layer: torch.nn.Module) -> None:
    """Around a method's processing of a layer after loading."""
    watched(lambda: process(method, layer), layer, recurse=False)


def require_plain_layers(model: torch.nn.Module, refresh: Callable[[], None]) -> None:
    """RuntimeError when a layer may compute from something else than its parameters as the loader wrote them."""
    require_plain({name: seen_of(layer) for name, layer in model.named_modules()
                   if getattr(layer, "quant_method", None) is not None and not hasattr(layer, CACHE_SCALES[0])},
                  model, refresh, REMEDY)


def cache_scales(model: torch.nn.Module) -> set[str]:
    """Parameters of quantised models that scale the key-value cache: no checkpoint of ours has them."""
    return {name for name, _ in model.named_parameters() if name.rpartition(".")[2] in CACHE_SCALES}


def seed_batch(info: Any, _cls: type, batch: Any, *_, **__) -> Any:
    """After a batch's sampling parameters are made: int64[requests], the seed of each."""
    if info.sampling_seed is None:
        seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
        info.sampling_seed = torch.tensor([NO_SEED if seed is None else seed for seed in seeds], dtype=torch.int64,
                                          device=batch.device)
    return info


def _receiver_of(updater: Any) -> Receiver:
    """The Receiver of this process, kept with the model that it writes to.

    Models with tensors derived from weights (MLA) remake them, in place, in their post_load_weights.
    """
    runner, workers = updater.tp_worker.model_runner, updater.tp_cpu_group
    if _RECEIVER not in runner.__dict__:
        remake, scales = getattr(runner.model, "post_load_weights", lambda: None), cache_scales(runner.model)
        kept = [(scale, scale.detach().clone()) for name, scale in runner.model.named_parameters() if name in scales]

        def refresh() -> None:
            remake()
            for scale, value in kept:  # SGLang saves buffers alone from a sleep, and these are none
                scale.data.copy_(value)

        require_plain_layers(runner.model, refresh)
        sys.setswitchinterval(SWITCH_S)
        setattr(runner, _RECEIVER, make_receiver(runner.model, runner.model.load_weights, dist.get_rank(workers),
                                                 dist.get_world_size(workers), refresh, scales))
    return getattr(runner, _RECEIVER)
