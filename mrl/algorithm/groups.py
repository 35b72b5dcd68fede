"""Comparing the samples of a group with one another. f64[B] scores and int64[B] group ids -> f64[B] advantages.

Equal ids form a group; groups may differ in size and need not be contiguous. A group whose scores are equal (to fp32
rounding) gets exactly 0, and so does a group of one sample: there is nothing to compare it with.
"""
from __future__ import annotations

from math import comb
from typing import Literal

import torch
from torch import Tensor

Std = Literal["unbiased", "biased", "none"]

# Rewards are fp32 numbers. Two that differ by a few units in the last place are the same reward computed in a
# different order; dividing that difference by its own standard deviation would turn it into an advantage of order 1.
_SAME = 4 * torch.finfo(torch.float32).eps


def differ(largest: Tensor, smallest: Tensor) -> Tensor:
    """Whether numbers between these two differ by more than fp32 rounding."""
    return largest - smallest > _SAME * torch.maximum(largest.abs(), smallest.abs())


def group_relative(scores: Tensor, group_ids: Tensor, std: Std) -> Tensor:
    """(r - m) / s with the group's mean m and standard deviation s over its G samples.

    GRPO (Shao et al. 2024, "DeepSeekMath"); s is `unbiased` (divisor G - 1) or `biased` (G). Without the division,
    `none`, it is Dr.GRPO (Liu et al. 2025, "Understanding R1-Zero-Like Training").
    """
    group = _Groups(group_ids)
    centered = scores - group.total(scores) / group.size
    if std != "none":
        count = (group.size - 1).clamp(min=1) if std == "unbiased" else group.size
        variance = group.total(centered.square()) / count
        centered = centered / torch.where(variance > 0, variance, 1.0).sqrt()
    return torch.where(group.varied(scores), centered, 0.0)


def leave_one_out(scores: Tensor, group_ids: Tensor) -> Tensor:
    """r - the mean of the group's other samples: RLOO (Ahmadian et al. 2024, "Back to Basics")."""
    size = _Groups(group_ids).size
    return group_relative(scores, group_ids, "none") * size / (size - 1).clamp(min=1)


def pass_at_k(scores: Tensor, group_ids: Tensor, k: int, std: Std) -> Tensor:
    """How much a sample raises the best of k: (E[max of k that include it] - E[max of k]) / std[max of k].

    The k are drawn from the group's G samples without repetition, and all C(G, k) choices are averaged exactly. For
    rewards of 0 and 1 these are the analytical advantages of Chen et al. 2025, "Pass@k Training". With std `none` there
    is no division. A group of at most k samples gets 0: there is only one choice.
    """
    advantages = torch.zeros_like(scores)
    for group in torch.unique(group_ids):
        members = (group_ids == group).nonzero().flatten()
        ordered, order = scores[members].sort()
        if len(members) <= k or not differ(ordered[-1], ordered[0]):
            continue
        chance = _chance_of_largest(len(members), k)
        mean = (chance * ordered).sum()
        best_with = torch.stack([_best_with(ordered, index, k) for index in range(len(ordered))])
        # Nothing varies where every choice holds one of the best.
        spread = (chance * (ordered - mean).square()).sum().sqrt() if std != "none" else 1.0
        advantages[members[order]] = (best_with - mean) / spread if spread > 0 else 0.0
    return advantages


def _best_with(ordered: Tensor, index: int, k: int) -> Tensor:
    """Mean of the largest of sample `index` and k - 1 others."""
    if k == 1:
        return ordered[index]
    others = torch.cat([ordered[:index], ordered[index + 1:]])
    return (_chance_of_largest(len(others), k - 1) * torch.maximum(others, ordered[index])).sum()


def _chance_of_largest(n: int, k: int) -> Tensor:
    """f64[n]: the chance of each of n ascending numbers to be the largest of k that are drawn."""
    return torch.tensor([comb(smaller, k - 1) / comb(n, k) for smaller in range(n)], dtype=torch.float64)


class _Groups:
    """Sums over groups, spread back to the samples: f64[B] -> f64[B]."""

    def __init__(self, ids: Tensor):
        self.index = torch.unique(ids, return_inverse=True)[1]
        self.size = self.total(torch.ones(len(ids), dtype=torch.float64))

    def total(self, values: Tensor) -> Tensor:
        return self._reduce(values, "sum")

    def varied(self, values: Tensor) -> Tensor:
        """bool[B]: whether the group's values differ."""
        return differ(self._reduce(values, "amax"), self._reduce(values, "amin"))

    def _reduce(self, values: Tensor, how: str) -> Tensor:
        empty = values.new_zeros(len(values))
        return empty.scatter_reduce(0, self.index, values, how, include_self=False)[self.index]
