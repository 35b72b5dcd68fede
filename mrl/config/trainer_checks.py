"""Checks of how the trainers save memory and time. Pure, as `mrl.config.checks`."""
from __future__ import annotations

from collections.abc import Iterator

from mrl.config.errors import Problem
from mrl.config.schema import Experiment
from mrl.config.sft import SftExperiment
from mrl.reshard.spec import ModelSpec


def check_trainer(exp: Experiment | SftExperiment, device: str) -> Iterator[Problem]:
    """Options of the trainers against each other, the dtype of the model, and `device`, "cpu" or "cuda"."""
    section = exp.trainer
    if section.moe_routing == "replay" and isinstance(exp, SftExperiment):
        yield Problem("trainer.moe_routing", "replay", "own: no engine chooses experts here", "remove the key")
    sections = {"trainer.optimizer": section.optimizer}
    if isinstance(exp, Experiment) and exp.algorithm.has_critic:
        sections["algorithm.critic.optimizer"] = exp.algorithm.critic.optimizer
    for key, optimizer in sections.items():
        if optimizer.grad_dtype == "bfloat16" and exp.model.dtype != "bfloat16":
            yield Problem(f"{key}.grad_dtype", "bfloat16", f"float32 with model.dtype {exp.model.dtype}: gradients are "
                          "no coarser than the weights", "remove the key")
        if optimizer.cpu_offload and device == "cpu":
            yield Problem(f"{key}.cpu_offload", "true", "false with cluster.device cpu, where the optimizer is in host "
                          "memory as it is", "remove the key")
    if section.overlap_param_gather and not section.overlap_grad_reduce:
        yield Problem("trainer.overlap_param_gather", "true", "false without trainer.overlap_grad_reduce, which cuts "
                      "the weights into the buckets that are fetched one by one",
                      "set trainer.overlap_grad_reduce: true")
    if section.recompute_layers is not None and section.recompute != "full":
        yield Problem("trainer.recompute_layers", str(section.recompute_layers),
                      f"null: with trainer.recompute {section.recompute} no whole layers are computed again",
                      "remove it, or set trainer.recompute: full")


def check_replay(exp: Experiment, device: str) -> Iterator[Problem]:
    """Whether the engines can tell which experts they choose on `device`."""
    if exp.trainer.moe_routing == "replay" and exp.rollout.engine == "vllm" and device == "cpu":
        yield Problem("trainer.moe_routing", "replay", "own with rollout.engine vllm on cluster.device cpu, whose "
                      "model runner there does not tell the experts it chooses",
                      "use own, rollout.engine: sglang, or GPUs")


def check_parts(exp: Experiment | SftExperiment, spec: ModelSpec) -> Iterator[Problem]:
    """Whether the model has what is to be computed again, or replayed."""
    section, moe = exp.trainer, spec.moe
    if section.moe_routing == "replay" and moe is None:
        yield Problem("trainer.moe_routing", "replay", "own: the model has no experts", "remove the key")
    if section.recompute != "selective":
        return
    missing = {"mla_up_proj": spec.mla is None, "shared_experts": moe is None or not moe.shared_ffn}
    for index, part in enumerate(section.recompute_modules):
        if missing.get(part):
            yield Problem(f"trainer.recompute_modules.{index}", part,
                          f"parts that {spec.family.architecture} has, which this one is not", "remove it")
    if {"moe", "shared_experts"} <= {*section.recompute_modules}:
        yield Problem("trainer.recompute_modules", str(section.recompute_modules),
                      "moe or shared_experts: the first is all of a layer's experts, shared ones too", "remove one")
