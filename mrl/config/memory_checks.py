"""Checks of how trainers and engines share the memory of GPUs. Pure; part of `mrl.config.checks`."""
from __future__ import annotations

from collections.abc import Iterator

from mrl.config.errors import Problem
from mrl.config.schema import Experiment

_TURNS = ("sleep_engines", "offload_trainers")
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# The argument that bounds an engine's share of its GPU's memory.
_MEMORY_FLAG = {"vllm": "--gpu-memory-utilization", "sglang": "--mem-fraction-static"}


def check_memory(exp: Experiment, device: str) -> Iterator[Problem]:
    """Everything about shared memory that could not work on `device`, "cpu" or "cuda"."""
    mode = exp.loop.mode
    shared = mode == "colocated_sync" and device == "cuda"
    for name in _TURNS:
        if getattr(exp.loop, name) and not shared:
            yield Problem(f"loop.{name}", "true", "null or false: trainers and engines share no GPU with loop.mode "
                          f"{mode} and cluster.device {device}", "remove the key, or use colocated_sync on cuda")
    if shared:
        yield from _check_share(exp)
    if shared and exp.engines_sleep(device):
        yield from _check_sleep(exp)


def _check_share(exp: Experiment) -> Iterator[Problem]:
    """An engine by itself takes nearly all of a GPU, so it must be told its share of one that it never has alone."""
    flags = [argument.partition("=")[0].replace("_", "-") for argument in exp.rollout.args]
    wanted = _MEMORY_FLAG[exp.rollout.engine]
    kept = [f"loop.{name} false" for name in _TURNS if getattr(exp.loop, name) is False]
    if kept and wanted not in flags:
        yield Problem("rollout.args", str(exp.rollout.args), f"with {wanted}, in loop.mode colocated_sync on cuda with "
                      f"{' and '.join(kept)}: trainer and engine are in the memory of a GPU together",
                      f"for example rollout.args: [{wanted}=0.35] (mrl check shows what the trainer needs), or remove "
                      f"the key{'s' if len(kept) > 1 else ''} of loop")


def _check_sleep(exp: Experiment) -> Iterator[Problem]:
    if exp.sync.delta:
        yield Problem("sync.delta", "true", "false where engines sleep: they forget their weights, so that every sync "
                      "is a whole one", "set sync.delta: false, or loop.sleep_engines: false")
    for name in _ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in (value := exp.rollout.env.get(name, "")).replace(" ", "").lower():
            yield Problem(f"rollout.env.{name}", value, "without expandable_segments where engines sleep: their memory "
                          "is allocated in a way of its own", "remove it, or set loop.sleep_engines: false")
