"""Advantages: how much better a sample is than the other samples of its prompt."""
from __future__ import annotations

import torch
from torch import Tensor

# Rewards are fp32 numbers. Two that differ by a few units in the last place are the same reward computed in a
# different order; dividing that difference by its own standard deviation would turn it into an advantage of order 1.
_SAME_REWARD = 4 * torch.finfo(torch.float32).eps


def group_advantages(rewards: Tensor, group_ids: Tensor, normalize_by_std: bool) -> Tensor:
    """Advantage of every sample relative to its group.

    With the group's mean m and unbiased standard deviation s over its G samples:
    GRPO (Shao et al. 2024, "DeepSeekMath") is (r - m) / s; without the division it is Dr.GRPO
    (Liu et al. 2025, "Understanding R1-Zero-Like Training").

    Args:
        rewards: f32[B], finite.
        group_ids: int64[B]; equal ids form a group. Groups may differ in size and need not be contiguous.
        normalize_by_std: divide by s.

    Returns:
        f32[B], always finite. A group whose rewards are equal (to fp32 rounding) gets exactly 0, and so does a group
        of one sample: there is nothing to compare it with.

    Raises:
        ValueError: shapes differ, or a reward is NaN or infinite (the message names its index).
    """
    if rewards.ndim != 1 or rewards.shape != group_ids.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must both be [B]")
    broken = (~torch.isfinite(rewards)).nonzero().flatten().tolist()
    if broken:
        index = broken[0]
        raise ValueError(f"rewards[{index}] is {rewards[index].item()} ({len(broken)} not finite in all): "
                         "every reward must be a finite number")
    if rewards.numel() == 0:
        return rewards.float()

    exact = rewards.double()
    _, group = torch.unique(group_ids, return_inverse=True)
    groups = int(group.max()) + 1

    def per_group(values: Tensor, reduce: str) -> Tensor:
        return values.new_zeros(groups).scatter_reduce(0, group, values, reduce, include_self=False)[group]

    size = per_group(torch.ones_like(exact), "sum")
    centered = exact - per_group(exact, "mean")
    spread = per_group(exact, "amax") - per_group(exact, "amin")
    varied = spread > _SAME_REWARD * per_group(exact.abs(), "amax")
    advantages = centered
    if normalize_by_std:
        variance = per_group(centered.square(), "sum") / (size - 1).clamp(min=1)
        advantages = centered / torch.where(varied, variance, 1.0).sqrt()
    return torch.where(varied, advantages, 0.0).float()
