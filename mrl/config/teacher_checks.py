"""Checks of the section `teacher` against the rest of the experiment. Pure; part of `mrl.config.checks`."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mrl.config.context import context_limit
from mrl.config.errors import Problem
from mrl.config.schema import Experiment
from mrl.engine.flags import OWNED_FLAGS, owned_flag


def check_teacher(exp: Experiment) -> Iterator[Problem]:
    """Everything about the teacher and what is learnt from it that could not work, or would have no effect."""
    distils = exp.algorithm.name == "distill"
    if distils and exp.teacher is None:
        yield Problem("teacher", "null", "a section with path and python: with algorithm.name distill a teacher's "
                      "log-probs are what is learnt", "add the section, or choose another algorithm.name")
    if exp.teacher is not None and not distils:
        yield Problem("teacher", exp.teacher.path,
                      f"null with algorithm.name {exp.algorithm.name}, which asks no teacher",
                      "remove the section, or set algorithm.name: distill")
    if exp.teacher is None:
        if exp.cluster.teacher_gpus is not None:
            yield Problem("cluster.teacher_gpus", str(exp.cluster.teacher_gpus), "null without a teacher",
                          "remove the key, or add the section teacher")
        return
    yield from _check_engines(exp)
    if exp.rollout.sampling.temperature != 1:
        yield Problem("rollout.sampling.temperature", str(exp.rollout.sampling.temperature),
                      "1.0 with a teacher: its log-probs are at temperature 1, and the student's must be, too",
                      "use 1.0")
    if exp.algorithm.kl.coef > 0 and exp.algorithm.kl.place == "reward":
        yield Problem("algorithm.kl.place", "reward", "loss with algorithm.name distill: its advantages are the "
                      "teacher's opinion of each token, and no reward", "set algorithm.kl.place: loss, or kl.coef: 0")


def check_teacher_model(exp: Experiment, hf_config: Mapping[str, Any],
                        teacher_config: Mapping[str, Any]) -> Iterator[Problem]:
    """Whether every sample of the student fits the teacher. Both configs: a model's config.json."""
    path, prompt, response = exp.teacher.path, exp.data.max_prompt_tokens, exp.rollout.sampling.max_response_tokens
    student, teacher = (config.get("text_config", config) for config in (hf_config, teacher_config))
    needed, limit = prompt + response + 1, context_limit(teacher)
    if limit is not None and needed > limit:
        yield Problem("teacher.path", path, f"a model that reaches {needed} positions, data.max_prompt_tokens "
                      f"({prompt}) + rollout.sampling.max_response_tokens ({response}) + 1 for what its engine must "
                      f"produce to answer; this one reaches {limit}",
                      "use another teacher, or shorten data.max_prompt_tokens or rollout.sampling.max_response_tokens")
    ids, known = student.get("vocab_size", 0), teacher.get("vocab_size")
    if known is not None and known < ids:
        yield Problem("teacher.path", path, f"a model that knows every id the student can sample: model.path has {ids} "
                      f"rows of output, this one embeds {known}", "use another teacher")


def _check_engines(exp: Experiment) -> Iterator[Problem]:
    teacher, gpus, tp = exp.teacher, exp.cluster.teacher_gpus, exp.teacher.parallel.tp
    if gpus is None:
        yield Problem("cluster.teacher_gpus", "null", "an integer > 0 with a teacher", "set cluster.teacher_gpus")
    elif gpus % tp:
        yield Problem("cluster.teacher_gpus", str(gpus), f"a multiple of teacher.parallel.tp ({tp})",
                      f"use {tp * max(1, gpus // tp)}, or change teacher.parallel.tp")
    for index, argument in enumerate(teacher.args):
        if flag := owned_flag(teacher.engine, argument):
            yield Problem(f"teacher.args.{index}", argument, f"other arguments: {flag} is mrl's own, since "
                          f"{OWNED_FLAGS[teacher.engine][flag]}", "remove it")
