"""From evaluated groups to results: one report a data set, with its subsets, as metrics and as lines to save. Pure."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mrl.config.schema import Eval
from mrl.evaluation.estimators import Floats, best_at_k, interval, majority_at_k, pass_at_k, subset_sizes
from mrl.rollout.types import Group

RESAMPLES = 1000
"""Of samples for maj@k, and of prompts for intervals."""


class Result(NamedTuple):
    """A mean over prompts, and the interval that it lies in with the confidence asked for."""

    value: float
    low: float
    high: float


@dataclass
class Report:
    """Results on one data set, or on a subset of it.

    results: by name, e.g. "acc/mean@8". counts: plain numbers by name. subsets: by the value in the subset column.
    """

    groups: list[Group]
    results: dict[str, Result]
    counts: dict[str, float]
    subset_key: str | None = None
    subsets: dict[str, Report] = field(default_factory=dict)


def reports(groups: Sequence[Group], config: Eval, seed: int) -> dict[str, Report]:
    """One report for each data set that `groups` come from, in the order of the experiment file.

    `seed` decides all resampling: the same groups and seed give the same numbers.
    """
    found = {}
    for name, dataset in config.datasets.items():
        own = [group for group in groups if group.request.dataset == name]
        if own:
            found[name] = _report(own, config.confidence, seed)
            if dataset.subset_key is not None:
                members = {value: [group for group in own if group.subset == value]
                           for value in sorted({group.subset for group in own})}
                found[name].subset_key = dataset.subset_key
                found[name].subsets = {value: _report(part, config.confidence, seed) for value, part in members.items()}
    return found


def flat_metrics(found: dict[str, Report]) -> dict[str, float]:
    """All numbers of all reports under dotted-path names, e.g. "eval/math/acc/mean@8" and "eval/math/acc/mean@8/low".

    The ends of an interval stand beside the mean: those of "acc/best@8/mean" are "acc/best@8/low" and "…/high". Results
    of a subset are under "eval/<data set>/by_<column>/<value>/".
    """
    return {name: value for dataset, report in found.items() for name, value in _flat(report, f"eval/{dataset}/")}


def sample_rows(groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    """Every sample, as a JSON-able mapping."""
    for group in groups:
        for index, t in enumerate(group.trajectories):
            yield {"prompt": group.prompt_text, "answer": group.answer, "row": group.request.prompt_index,
                   "subset": group.subset, "sample": index, "response": t.response_text, "extracted": t.extracted,
                   "reward": t.reward, "reward_parts": t.reward_parts, "correct": t.correct,
                   "reward_error": t.reward_error, "finish_reason": t.finish_reason, "tokens": t.response_length,
                   "version": str(t.version)}


def _report(groups: list[Group], confidence: float, seed: int) -> Report:
    values = _per_prompt(groups, seed)
    low, high = interval(list(values.values()), confidence, RESAMPLES, seed)
    results = {name: Result(float(each.mean()), float(low[i]), float(high[i]))
               for i, (name, each) in enumerate(values.items())}
    trajectories = [t for group in groups for t in group.trajectories]
    return Report(groups, results, {
        "prompts": len(groups),
        "response_length_max": max(t.response_length for t in trajectories),
        "reward_errors": sum(t.reward_error is not None for t in trajectories),
        "groups_regenerated": sum(group.regenerated for group in groups),
    })


def _per_prompt(groups: list[Group], seed: int) -> dict[str, Floats]:
    """Every result of every prompt, [P] each, by name."""
    def table(value) -> np.ndarray:
        return np.array([[value(t) for t in group.trajectories] for group in groups])

    correct, rewards = table(lambda t: t.correct), table(lambda t: t.reward)
    n = correct.shape[1]
    values = {f"acc/mean@{n}": correct.mean(axis=1)}
    answers = _answer_codes(groups)
    for k in subset_sizes(n):
        values[f"acc/best@{k}/mean"] = best_at_k(correct, k)
        if answers is not None:
            values[f"acc/maj@{k}/mean"] = majority_at_k(correct, answers, k, RESAMPLES, seed)
        values[f"pass@{k}"] = pass_at_k(correct, k)
    parts = list(groups[0].trajectories[0].reward_parts)
    return values | {
        f"reward/mean@{n}": rewards.mean(axis=1),
        **({f"reward/{part}/mean@{n}": table(lambda t: t.reward_parts[part]).mean(axis=1) for part in parts}
           if len(parts) > 1 else {}),
        "response_length": table(lambda t: t.response_length).mean(axis=1),
        "truncated": table(lambda t: t.finish_reason == "length").mean(axis=1),
    }


def _answer_codes(groups: list[Group]) -> np.ndarray | None:
    """int [P, n]: equal numbers within a prompt are equal extracted answers; None if the reward extracts none."""
    if not any(t.extracted for group in groups for t in group.trajectories):
        return None
    rows = []
    for group in groups:
        codes: dict[str | None, int] = {}
        rows.append([codes.setdefault(t.extracted or None, len(codes)) for t in group.trajectories])
    return np.array(rows)


def _flat(report: Report, prefix: str) -> Iterator[tuple[str, float]]:
    for name, result in report.results.items():
        stem = name.removesuffix("/mean")
        yield from ((prefix + name, result.value), (f"{prefix}{stem}/low", result.low),
                    (f"{prefix}{stem}/high", result.high))
    for name, value in report.counts.items():
        yield prefix + name, value
    for subset, part in report.subsets.items():
        yield from _flat(part, f"{prefix}by_{report.subset_key}/{subset}/")
