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


def all_equal(rewards: Sequence[float]) -> bool:
    """Whether the rewards of a group are all the same number in fp32, so that every advantage in it is 0."""
    return max(rewards) - min(rewards) <= _SAME_REWARD * max(map(abs, rewards))


def rejection(rewards: Sequence[float], accuracy: float, filters: Filters) -> Optional[Rejection]:
    """Why the filters reject a group; None: it is kept.

    zero_variance: all rewards are equal, so that every advantage would be 0 (DAPO, Yu et al. 2025, eq. 11: neither all
    nor none are right). accuracy_low, accuracy_high: outside the inclusive band of accuracies.

    Args:
        rewards: one a sample, at least one, finite.
        accuracy: the share of its samples that are right.
    """
    if filters.zero_variance and all_equal(rewards):
        return "zero_variance"
    if filters.accuracy_min is not None and accuracy < filters.accuracy_min:
        return "accuracy_low"
    if filters.accuracy_max is not None and accuracy > filters.accuracy_max:
        return "accuracy_high"
    return None
