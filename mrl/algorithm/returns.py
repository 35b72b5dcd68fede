"""What follows a token: sums of later rewards, generalised advantages. f64[n] over the sampled tokens of a sequence.

Callers leave masked tokens (prompts, tools) out: to these functions the next token is the next *sampled* one.
"""
from __future__ import annotations

import torch
from torch import Tensor

from mrl.algorithm.groups import differ


def returns_to_go(rewards: Tensor) -> Tensor:
    """Sum of a token's reward and all later ones, undiscounted."""
    return rewards.flip(0).cumsum(0).flip(0)


def gae(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016): A_t = sum_l (gamma lam)^l delta_(t+l).

    delta_t = r_t + gamma V_(t+1) - V_t. The value after the last token is 0: an episode ends where it was cut off.

    Args:
        rewards: f64[n]; the last one holds the reward of the whole response.
        values: f64[n]; V_t is the critic's value before token t is sampled.

    Returns:
        advantages A and returns A + V, what the critic is to learn: f64[n] each.
    """
    after = torch.cat([values[1:], values.new_zeros(min(1, len(values)))])
    found, later = [], 0.0
    for delta in (rewards + gamma * after - values).flip(0).tolist():  # a tensor a token would take 200 times as long
        later = delta + gamma * lam * later
        found.append(later)
    advantages = values.new_tensor(found).flip(0)
    return advantages, advantages + values


def whiten(values: Tensor, weights: Tensor) -> Tensor:
    """(v - m) / s with the weighted mean m and the weighted (population) standard deviation s. f64[N] -> f64[N].

    Exactly 0 where all values of positive weight are equal to fp32 rounding.
    """
    counted = values[weights > 0]
    if not len(counted) or not differ(counted.max(), counted.min()):
        return torch.zeros_like(values)
    share = weights / weights.sum()
    centered = values - (share * values).sum()
    return centered / (share * centered.square()).sum().sqrt()
