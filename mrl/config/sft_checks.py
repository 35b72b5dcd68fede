"""Checks across keys of one supervised fine-tuning and its model. Pure, as `mrl.config.checks`."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mrl.config.checks import against, check_cuts, check_experts, resolved_device, trainer_cuts
from mrl.config.context import context_limit
from mrl.config.errors import Problem
from mrl.config.sft import SftExperiment
from mrl.config.trainer_checks import check_parts, check_trainer
from mrl.reshard.spec import model_spec


def check_sft(exp: SftExperiment, hf_config: Mapping[str, Any] | None, visible_gpus: int) -> list[Problem]:
    """Everything about the fine-tuning that could not work. Arguments as for `check_experiment`."""
    device = resolved_device(exp, visible_gpus)
    problems = [*_check_ranks(exp, visible_gpus), *_check_data(exp), *check_trainer(exp, device)]
    if hf_config is not None:
        problems += _check_model(exp, hf_config)
    return problems


def _check_ranks(exp: SftExperiment, visible_gpus: int) -> Iterator[Problem]:
    ranks, device = exp.cluster.trainer_gpus, resolved_device(exp, visible_gpus)
    try:
        layout = exp.trainer.parallel.layout(ranks)
    except ValueError as error:
        yield Problem("cluster.trainer_gpus", str(ranks), "a number of ranks that trainer.parallel divides", str(error))
    else:
        if exp.batch.samples_per_step < layout.replicas:
            yield Problem("batch.samples_per_step", str(exp.batch.samples_per_step),
                          f"at least {layout.replicas}, one a data-parallel replica", "use more samples or fewer ranks")
    if device == "cpu" and exp.model.dtype == "bfloat16":
        yield Problem("model.dtype", "bfloat16", "float32 on cpu",
                      "set model.dtype: float32; for a file meant for GPUs, set cluster.device: cuda")
    if device == "cuda" and ranks > visible_gpus:
        yield Problem("cluster.trainer_gpus", str(ranks), f"at most the {visible_gpus} GPUs that are visible here",
                      "use fewer, check CUDA_VISIBLE_DEVICES, or set cluster.device: cpu")


def _check_data(exp: SftExperiment) -> Iterator[Problem]:
    if exp.eval.every and exp.data.eval is None:
        yield Problem("data.eval", "null", f"held-out prompts and answers (eval.every is {exp.eval.every})",
                      "set data.eval, or eval.every: 0")
    if exp.batch.max_tokens_per_microbatch < exp.data.max_prompt_tokens:
        yield Problem("batch.max_tokens_per_microbatch", str(exp.batch.max_tokens_per_microbatch),
                      f"more than data.max_prompt_tokens ({exp.data.max_prompt_tokens}): one sample must fit",
                      "raise it, or shorten prompts")


def _check_model(exp: SftExperiment, hf_config: Mapping[str, Any]) -> Iterator[Problem]:
    try:
        spec = model_spec(hf_config, exp.model.mtp)
    except (ValueError, KeyError) as error:
        yield Problem("model.path", exp.model.path, "a supported model", str(error))
        return
    if spec.untrainable:
        yield Problem("model.path", exp.model.path, "a model that can be trained",
                      f"{spec.family.architecture} cannot: {spec.untrainable}")
    yield from check_experts(exp, spec)
    yield from check_parts(exp, spec)
    yield from check_cuts(exp, against(spec, trainer_cuts(exp.trainer.parallel)))
    limit = context_limit(hf_config)
    if limit is not None and exp.data.max_prompt_tokens > limit:
        yield Problem("data.max_prompt_tokens", str(exp.data.max_prompt_tokens),
                      f"at most {limit}, the positions that the model reaches", "lower it")
