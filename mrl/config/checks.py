"""Checks across keys of one experiment and its model. Pure: no file, device or network is touched.

Each `_check_*` function yields the problems of one subject; `check_experiment` lists all of them.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import lcm
from operator import attrgetter
from typing import Any, Callable

from mrl.config.algorithm_checks import check_algorithm
from mrl.config.context import context_limit
from mrl.config.critic_checks import check_critic, check_critic_model
from mrl.config.errors import Problem
from mrl.config.memory_checks import check_memory
from mrl.config.optimizer import Optimizer
from mrl.config.quantization_checks import check_fp8, check_quantization
from mrl.config.reward_checks import check_rewards
from mrl.config.rollout_checks import check_drawing
from mrl.config.schema import Experiment, Rollout, RolloutParallel, Teacher
from mrl.config.sft import SftExperiment
from mrl.config.section import Section
from mrl.config.teacher_checks import check_teacher, check_teacher_model
from mrl.config.trainer import TrainerParallel
from mrl.config.trainer_checks import check_parts, check_replay, check_trainer
from mrl.engine.flags import OWNED_FLAGS, owned_flag
from mrl.reshard.engine_layout import VOCAB_MULTIPLE
from mrl.reshard.layout import Layout
from mrl.reshard.spec import ModelSpec, layout_problems, model_spec

Cut = Callable[[int], Layout]
"""The layout with one parallel size, all others left out."""
Against = Callable[[int], list[str]]
"""Why a model cannot be cut by this size; nothing: it can."""

_LARGEST_SIZE = 64  # of a parallel dimension that a remedy proposes
_ADD_DATASET = "for example eval.datasets.heldout.path=heldout.jsonl"


def check_experiment(exp: Experiment, hf_config: Mapping[str, Any] | None, visible_gpus: int | None = None,
                     critic_config: Mapping[str, Any] | None = None,
                     teacher_config: Mapping[str, Any] | None = None) -> list[Problem]:
    """Everything about the experiment that could not work.

    Args:
        hf_config: the model's config.json; None skips the checks that need it (the file is missing: another problem).
        visible_gpus: GPUs on this machine; None: they are not to be counted (`cluster.device: auto` then means cuda).
        critic_config, teacher_config: config.json of `algorithm.critic.path` and `teacher.path`, likewise.
    """
    wanted, device = _partitions(exp), resolved_device(exp, visible_gpus)
    problems = [*_check_partitions(exp, wanted), *_check_devices(exp, (*wanted, "teacher_gpus"), visible_gpus),
                *_check_batch(exp), *_check_sampling(exp), *check_algorithm(exp), *check_critic(exp),
                *_check_optimizers(exp), *check_trainer(exp, device), *check_replay(exp, device),
                *_check_engines(exp), *_check_engine_split("rollout", exp.rollout, device),
                *(_check_engine_split("teacher", exp.teacher, device) if exp.teacher else ()),
                *check_quantization(exp, device), *check_memory(exp, device),
                *_check_transport(exp, visible_gpus), *check_rewards(exp), *check_teacher(exp), *check_drawing(exp)]
    if exp.eval.every and not exp.eval.datasets:
        problems.append(Problem("eval.datasets", "{}", f"at least one held-out data set (eval.every is "
                                f"{exp.eval.every})", f"{_ADD_DATASET}, or set eval.every: 0"))
    if hf_config is not None:
        problems += _check_model(exp, hf_config, trainer_cuts(exp.trainer.parallel), critic_config)
    if hf_config is not None and teacher_config is not None:
        problems += check_teacher_model(exp, hf_config, teacher_config)
    return problems


def check_evaluation(exp: Experiment, hf_config: Mapping[str, Any] | None, visible_gpus: int) -> list[Problem]:
    """Everything that could not work without trainers, when the engines of the experiment only evaluate.

    Arguments as for `check_experiment`.
    """
    wanted = _partitions(exp)[-1:]
    problems = [*_check_counts(exp, wanted), *_check_devices(exp, wanted, visible_gpus), *_check_engines(exp),
                *_check_engine_split("rollout", exp.rollout, resolved_device(exp, visible_gpus)), *check_rewards(exp)]
    if not exp.eval.datasets:
        problems.append(Problem("eval.datasets", "{}", "at least one held-out data set to evaluate on", _ADD_DATASET))
    if hf_config is not None:
        problems += _check_model(exp, hf_config, {})
    return problems


def resolved_device(exp: Experiment | SftExperiment, visible_gpus: int | None) -> str:
    """"cpu" or "cuda": what `cluster.device: auto` means with this many visible GPUs (None: unknown, taken as cuda)."""
    if exp.cluster.device != "auto":
        return exp.cluster.device
    return "cpu" if visible_gpus == 0 else "cuda"


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, min(number, _LARGEST_SIZE) + 1) if number % n == 0)


def _partitions(exp: Experiment) -> tuple[str, ...]:
    """The keys of `cluster` that hold the partitions' sizes in this mode; the last one is the engines'."""
    return ("gpus",) if exp.loop.mode == "colocated_sync" else ("trainer_gpus", "rollout_gpus")


def _check_partitions(exp: Experiment, wanted: tuple[str, ...]) -> Iterator[Problem]:
    for name in ("trainer_gpus", "rollout_gpus", "gpus"):
        if name not in wanted and (value := getattr(exp.cluster, name)) is not None:
            yield Problem(f"cluster.{name}", str(value), f"null (loop.mode is {exp.loop.mode}, which uses "
                          f"{' and '.join(f'cluster.{key}' for key in wanted)})", f"remove cluster.{name}")
    yield from _check_counts(exp, wanted)
    parallel = exp.trainer.parallel
    dense, experts = parallel.pp * parallel.tp * parallel.cp, parallel.pp * parallel.ep * parallel.etp
    words = "trainer.parallel.tp * cp * pp"
    if dense % experts:
        words = f"of {words} and of trainer.parallel.ep * etp * pp"
    yield from _check_split(exp, wanted[0], lcm(dense, experts), words)


def _check_counts(exp: Experiment, wanted: tuple[str, ...]) -> Iterator[Problem]:
    """The partitions that are `wanted` are given, and the last one holds whole engines."""
    for name in wanted:
        if getattr(exp.cluster, name) is None:
            yield Problem(f"cluster.{name}", "null", f"an integer > 0 (loop.mode is {exp.loop.mode})",
                          f"set cluster.{name}, or another loop.mode")
    yield from _check_split(exp, wanted[-1], exp.rollout.parallel.tp, "rollout.parallel.tp")


def _check_devices(exp: Experiment, partitions: tuple[str, ...], visible_gpus: int | None) -> Iterator[Problem]:
    """`partitions`: the keys of `cluster` that count GPUs which are needed at once."""
    device = resolved_device(exp, visible_gpus)
    if device == "cpu" and exp.model.dtype == "bfloat16":
        yield Problem("model.dtype", "bfloat16", "float32 on cpu",
                      "set model.dtype: float32; for a file meant for GPUs, set cluster.device: cuda")
    needed = sum(getattr(exp.cluster, name) or 0 for name in partitions)
    if device == "cuda" and visible_gpus is not None and needed > visible_gpus:
        name = "device" if visible_gpus == 0 else partitions[0]
        yield Problem(f"cluster.{name}", str(getattr(exp.cluster, name)),
                      f"too few GPUs: the partitions need {needed}, {visible_gpus} are visible here",
                      "use smaller partitions, check CUDA_VISIBLE_DEVICES, or set cluster.device: cpu")


def _check_split(exp: Experiment, name: str, parts: int, what: str) -> Iterator[Problem]:
    value = getattr(exp.cluster, name)
    if value is not None and value % parts:
        yield Problem(f"cluster.{name}", str(value), f"a multiple of {parts} ({what})",
                      f"use {parts * max(1, value // parts)} GPUs, or change {what}")


def _check_batch(exp: Experiment) -> Iterator[Problem]:
    batch, prompts = exp.batch, exp.batch.prompts_per_step
    if prompts % batch.minibatches:
        yield Problem("batch.minibatches", str(batch.minibatches), f"a divisor of batch.prompts_per_step ({prompts})",
                      f"use one of {_divisors(prompts)}")
    elif exp.data_parallel > (samples := prompts * batch.samples_per_prompt // batch.minibatches):
        yield Problem("batch.minibatches", str(batch.minibatches),
                      f"minibatches of at least {exp.data_parallel} samples, one a data-parallel replica; these have "
                      f"{samples}", "use fewer minibatches, more prompts or samples, or fewer trainer GPUs")
    longest = exp.data.max_prompt_tokens + exp.rollout.sampling.max_response_tokens
    if batch.max_tokens_per_microbatch < longest:
        yield Problem("batch.max_tokens_per_microbatch", str(batch.max_tokens_per_microbatch),
                      f"at least {longest} (data.max_prompt_tokens + rollout.sampling.max_response_tokens): one sample "
                      "must fit", f"set it to {longest} or more, or shorten prompts or responses")


def _check_sampling(exp: Experiment) -> Iterator[Problem]:
    """Log-probs in training are those of the full, temperature-scaled distribution: the engine must sample from it."""
    sampling, why = exp.rollout.sampling, "training needs the log-probs of the full distribution it samples from"
    if sampling.temperature == 0:
        yield Problem("rollout.sampling.temperature", "0", f"a number > 0: {why}",
                      "use 1.0; that of eval.datasets may be 0")
    if sampling.top_p < 1:
        yield Problem("rollout.sampling.top_p", str(sampling.top_p), f"1.0: {why}", "remove the key")
    if sampling.top_k not in (-1, 0):
        yield Problem("rollout.sampling.top_k", str(sampling.top_k), f"-1 (all tokens): {why}", "remove the key")


def _check_optimizers(exp: Experiment) -> Iterator[Problem]:
    yield from _check_optimizer("trainer.optimizer", exp.trainer.optimizer, exp.policy_updates)
    if exp.algorithm.has_critic:
        yield from _check_optimizer("algorithm.critic.optimizer", exp.algorithm.critic.optimizer, exp.critic_updates)
    if exp.trainer.parallel.sequence_parallel and exp.trainer.parallel.tp == 1:
        yield Problem("trainer.parallel.sequence_parallel", "true", "false with trainer.parallel.tp 1: it splits "
                      "sequences over the tensor-parallel ranks", "remove it, or raise trainer.parallel.tp")


def _check_optimizer(key: str, optimizer: Optimizer, updates: int) -> Iterator[Problem]:
    """`updates`: optimizer steps of the whole run."""
    if optimizer.min_lr > optimizer.lr:
        yield Problem(f"{key}.min_lr", str(optimizer.min_lr), f"at most {key}.lr ({optimizer.lr})",
                      "lower it, or raise lr")
    if optimizer.schedule != "constant" and optimizer.warmup_steps >= updates:
        yield Problem(f"{key}.warmup_steps", str(optimizer.warmup_steps),
                      f"less than the run's {updates} optimizer steps", "shorten the warm-up, or run more steps")


def _check_engines(exp: Experiment) -> Iterator[Problem]:
    if exp.rollout.port and exp.rollout.port + exp.engine_count - 1 > 65535:
        yield Problem("rollout.port", str(exp.rollout.port), f"at most {65536 - exp.engine_count}: engine i of "
                      f"{exp.engine_count} takes port + i", "use a lower port, or 0 for free ones")
    for index, argument in enumerate(exp.rollout.args):
        if flag := owned_flag(exp.rollout.engine, argument):
            yield Problem(f"rollout.args.{index}", argument, f"other arguments: {flag} is mrl's own, since "
                          f"{OWNED_FLAGS[exp.rollout.engine][flag]}", "remove it")


def _check_engine_split(key: str, section: Rollout | Teacher, device: str) -> Iterator[Problem]:
    """The sizes of one engine against each other, and against what its server can do on `device`. `key`: the section's.
    """
    parallel, engine, tp = section.parallel, section.engine, section.parallel.tp
    for name in ("ep", "dp"):
        if tp % getattr(parallel, name):
            yield Problem(f"{key}.parallel.{name}", str(getattr(parallel, name)),
                          f"a divisor of {key}.parallel.tp ({tp})", f"use one of {_divisors(tp)}")
    if engine == "vllm" and parallel.dp > 1:
        yield Problem(f"{key}.parallel.dp", str(parallel.dp), f"1 with {key}.engine vllm: what the workers of "
                      "further replicas answer never leaves its server, so their weights could not be checked",
                      f"use 1 and more engines (a smaller {key}.parallel.tp), or {key}.engine: sglang")
    if engine == "sglang" and parallel.dp > 1 and device == "cpu":
        yield Problem(f"{key}.parallel.dp", str(parallel.dp), "1 with cluster.device cpu, where SGLang's attention has "
                      "no data parallelism", "use 1, or GPUs")
    if engine == "vllm" and tp % parallel.ep == 0 and parallel.ep not in (1, tp):
        yield Problem(f"{key}.parallel.ep", str(parallel.ep), f"1 or {key}.parallel.tp ({tp}) with {key}.engine "
                      f"vllm, which deals experts out over all GPUs of an engine", f"use one of them, or {key}.engine: "
                      "sglang")


def _check_transport(exp: Experiment, visible_gpus: int | None) -> Iterator[Problem]:
    device, transport = resolved_device(exp, visible_gpus), exp.sync.transport
    shared = exp.loop.mode == "colocated_sync"
    if transport == "nccl" and (device == "cpu" or shared):
        yield Problem("sync.transport", "nccl", "gloo: NCCL connects a trainer's GPU to another one, and there is none "
                      f"with cluster.device {device} and loop.mode {exp.loop.mode}", "use auto or gloo")
    if transport == "cuda_ipc" and not (device == "cuda" and shared):
        yield Problem("sync.transport", "cuda_ipc", "gloo or nccl: cuda_ipc copies within one GPU, and trainers and "
                      f"engines share none with cluster.device {device} and loop.mode {exp.loop.mode}",
                      "use auto, or loop.mode: colocated_sync on cuda")
    if transport == "cuda_ipc" and exp.sync.strategy not in ("auto", "multi_sender"):
        yield Problem("sync.strategy", exp.sync.strategy, "multi_sender with sync.transport cuda_ipc: a worker can "
                      "receive only from the trainer rank on its own GPU", "use auto, or another sync.transport")
    if transport == "cuda_ipc" and exp.cluster.gpus_per_node % exp.rollout.parallel.tp:
        yield Problem("cluster.gpus_per_node", str(exp.cluster.gpus_per_node),
                      f"a multiple of rollout.parallel.tp ({exp.rollout.parallel.tp}) with sync.transport cuda_ipc: an "
                      "engine's workers join what each received, inside one machine",
                      "change one of them, or use another sync.transport")
    if exp.sync.delta and transport == "disk":
        yield Problem("sync.delta", "true", "false: with sync.transport disk, files hold whole tensors",
                      "set sync.delta: false, or another transport")
    if exp.sync.disk_dir is not None and transport != "disk":
        yield Problem("sync.disk_dir", exp.sync.disk_dir, f"null: sync.transport {transport} writes no files",
                      "remove sync.disk_dir, or set sync.transport: disk")


def trainer_cuts(parallel: TrainerParallel) -> dict[str, Cut]:
    """How the trainers cut the model, one parallel size at a time, by the key that gives the size."""
    uneven = {"first_stage_layers": parallel.first_stage_layers, "last_stage_layers": parallel.last_stage_layers}
    return {
        "trainer.parallel.tp": lambda size: Layout(tp=size),
        "trainer.parallel.pp": lambda size: Layout(pp=size, **uneven),
        "trainer.parallel.vpp": lambda size: Layout(pp=parallel.pp, vpp=size, **uneven),
        "trainer.parallel.ep": lambda size: Layout(dp=size, ep=size),
        "trainer.parallel.etp": lambda size: Layout(dp=size, etp=size),
    }


def _check_model(exp: Experiment, hf_config: Mapping[str, Any], cuts: Mapping[str, Cut],
                 critic_config: Mapping[str, Any] | None = None) -> Iterator[Problem]:
    """`cuts`: those of the trainers; none where there are no trainers."""
    try:
        spec = model_spec(hf_config, exp.model.mtp)
    except (ValueError, KeyError) as error:
        yield Problem("model.path", exp.model.path, "a supported model", str(error))
        return
    if cuts and spec.untrainable:
        yield Problem("model.path", exp.model.path, "a model that can be trained",
                      f"{spec.family.architecture} cannot: {spec.untrainable}")
    if cuts:
        yield from check_experts(exp, spec)
        yield from check_parts(exp, spec)
    if critic_config is not None:
        yield from check_critic_model(exp, critic_config)
    against_each = against(spec, cuts)
    parallel = exp.rollout.parallel
    if not any(parallel.tp % size for size in (parallel.ep, parallel.dp)):
        against_each |= _engine_cuts(parallel, spec)
    problems = [*check_cuts(exp, against_each)]
    yield from problems
    if cuts and exp.rollout.quantization and not problems:  # engines that only evaluate have none
        yield from check_fp8(exp, spec)
    padded, engine_tp = -(-spec.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE, exp.rollout.parallel.tp
    if padded % engine_tp:
        yield Problem("rollout.parallel.tp", str(engine_tp), f"a divisor of the engine's padded vocabulary ({padded})",
                      "use a power of 2")
    yield from _check_tokens(exp, spec, hf_config)


def against(spec: ModelSpec, cuts: Mapping[str, Cut]) -> dict[str, Against]:
    """By key, why trainers cannot cut the model by a size."""
    return {key: lambda size, cut=cut: layout_problems(spec, cut(size)) for key, cut in cuts.items()}


def check_cuts(exp: Section, against_each: Mapping[str, Against]) -> Iterator[Problem]:
    """Whether the model can be cut as the sizes at these keys say."""
    found: set[str] = set()
    for key, against in against_each.items():
        size = attrgetter(key)(exp)
        # A stage whose layers do not divide has chunks whose layers do not.
        reasons = [reason for reason in against(size) if "vpp" not in key or reason not in found]
        found.update(reasons)
        if reasons:
            sizes = [str(n) for n in range(1, _LARGEST_SIZE + 1) if not against(n)]
            yield Problem(key, str(size), f"what the model can be cut into: {'; '.join(reasons)}",
                          f"use one of {', '.join(sizes)}" if sizes else "change the layers of the other stages")


def _engine_cuts(parallel: RolloutParallel, spec: ModelSpec) -> dict[str, Against]:
    """By key, why an engine cannot cut the model by a size: MLPs over tp, attention over tp / dp, experts over tp / ep,
    each as Megatron does."""
    def by_tp(tp: int) -> list[str]:
        if tp % parallel.ep or tp % parallel.dp:
            return [f"tp {tp} is no multiple of ep {parallel.ep} and dp {parallel.dp}"]
        etp = tp // parallel.ep if spec.moe else 1
        return layout_problems(spec, Layout(tp=tp, etp=etp), attention_tp=tp // parallel.dp)

    def by_ep(ep: int) -> list[str]:
        return layout_problems(spec, Layout(dp=ep, ep=ep)) + (
            [f"ep {ep} does not divide tp {parallel.tp}"] if parallel.tp % ep else [])

    return {"rollout.parallel.tp": by_tp, "rollout.parallel.ep": by_ep}


def check_experts(exp: Experiment | SftExperiment, spec: ModelSpec) -> Iterator[Problem]:
    """What a mixture of experts wants of the trainers, and what a dense model has no use for."""
    parallel, coef = exp.trainer.parallel, exp.trainer.moe.aux_loss_coef
    if spec.moe and parallel.tp > 1 and not parallel.sequence_parallel:
        yield Problem("trainer.parallel.sequence_parallel", "false", "true with trainer.parallel.tp "
                      f"{parallel.tp} and the experts of {spec.family.architecture}: each rank routes its own tokens",
                      "set trainer.parallel.sequence_parallel: true")
    if coef and spec.moe is None:
        yield Problem("trainer.moe.aux_loss_coef", str(coef), "0: the model has no experts to balance",
                      "remove the key")


def _check_tokens(exp: Experiment, spec: ModelSpec, hf_config: Mapping[str, Any]) -> Iterator[Problem]:
    prompt, limit = exp.data.max_prompt_tokens, context_limit(hf_config)
    responses = {"rollout.sampling": exp.rollout.sampling.max_response_tokens} | {
        f"eval.datasets.{name}.sampling": dataset.sampling.max_response_tokens or 0
        for name, dataset in exp.eval.datasets.items()}
    for key, response in responses.items():
        if limit is not None and prompt + response > limit:
            yield Problem(f"{key}.max_response_tokens", str(response),
                          f"at most {max(0, limit - prompt)}: with data.max_prompt_tokens ({prompt}) the model reaches "
                          f"{limit} positions", "shorten either")
    for token in exp.rollout.sampling.stop_token_ids:
        if token >= spec.vocab:
            yield Problem("rollout.sampling.stop_token_ids", str(token), f"token ids < {spec.vocab}", "remove it")
