"""Which groups are left out of a batch. Groups are kept or rejected whole: the samples of one are compared with each
other, and a group that had lost some would compare with others than were sampled."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Optional

from mrl.config.schema import Filters

Rejection = Literal["zero_variance", "accuracy_low", "accuracy_high"]
REJECTIONS: tuple[Rejection, ...] = ("zero_variance", "accuracy_low", "accuracy_high")

_SAME_REWARD = 4 * 2.0 ** -23
"""Relative difference below which two rewards are the same number in fp32, as for advantages."""


def accuracy(rewards: Sequence[float]) -> float:
    """Share of a group's samples that have full marks (reward ≥ 1). `rewards`: at least one."""
    return sum(reward >= 1 for reward in rewards) / len(rewards)


def rejection(rewards: Sequence[float], filters: Filters) -> Optional[Rejection]:
    """Why the filters reject the group with these rewards, one a sample (at least one, finite); None: it is kept.

    zero_variance: all rewards are equal, so that every advantage would be 0 (DAPO, Yu et al. 2025, eq. 11: neither all
    nor none are right). accuracy_low, accuracy_high: outside the inclusive band of accuracies.
    """
    if filters.zero_variance and max(rewards) - min(rewards) <= _SAME_REWARD * max(map(abs, rewards)):
        return "zero_variance"
    if filters.accuracy_min is not None and accuracy(rewards) < filters.accuracy_min:
        return "accuracy_low"
    if filters.accuracy_max is not None and accuracy(rewards) > filters.accuracy_max:
        return "accuracy_high"
    return None
