"""Checks of what a batch is made of: filters, dynamic sampling, the overlong penalty. Pure, as `mrl.config.checks`."""
from __future__ import annotations

from collections.abc import Iterator

from mrl.config.errors import Problem
from mrl.config.schema import Experiment


def check_drawing(exp: Experiment) -> Iterator[Problem]:
    """Everything about the drawing and shaping of samples that could not work."""
    yield from _check_filters(exp)
    yield from _check_oversampling(exp)
    buffer, limit = exp.reward.overlong.buffer_tokens, exp.rollout.sampling.max_response_tokens
    if buffer > limit:
        yield Problem("reward.overlong.buffer_tokens", str(buffer),
                      f"at most rollout.sampling.max_response_tokens ({limit}), whose last tokens it names",
                      "use a quarter of it or less")


def _check_filters(exp: Experiment) -> Iterator[Problem]:
    filters, samples = exp.rollout.filters, exp.batch.samples_per_prompt
    low, high = filters.accuracy_min, filters.accuracy_max
    if low is not None and high is not None and low > high:
        yield Problem("rollout.filters.accuracy_min", str(low), f"at most rollout.filters.accuracy_max ({high})",
                      "swap them")
    if filters.zero_variance and samples < 2:
        yield Problem("rollout.filters.zero_variance", "true", f"false with batch.samples_per_prompt {samples}: the "
                      "one reward of a group equals itself, so every group would be left out",
                      "use 2 samples or more, or remove the filter")


def _check_oversampling(exp: Experiment) -> Iterator[Problem]:
    extra, prompts = exp.rollout.oversample, exp.batch.prompts_per_step
    if extra and not exp.rollout.filters.active:
        yield Problem("rollout.oversample", str(extra), "0 without rollout.filters: no group is left out, and the "
                      "first batch.prompts_per_step prompts are the batch",
                      "set a filter, or remove rollout.oversample")
    most = (exp.rollout.dynamic_sampling.max_gen_batches - 1) * prompts
    if extra > most:
        yield Problem("rollout.oversample", str(extra), f"at most {most}: a step draws no more than "
                      f"rollout.dynamic_sampling.max_gen_batches ({most // prompts + 1}) times batch.prompts_per_step "
                      f"({prompts})", "lower it, or raise rollout.dynamic_sampling.max_gen_batches")
