"""The policy term of the loss, per token. Every function maps f32[N] to f32[N]; token weights do the reduction.

Masked positions must hold finite numbers (`torch.where` before calling), because a NaN that has entered arithmetic
survives multiplication by 0, in the value and in the gradient.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.algorithm.numeric import safe_exp, sequence_sum
from mrl.config.algorithm import Algorithm, Clip


@dataclass(frozen=True)
class PolicyTerm:
    """loss: f32[N] with gradient. ratio: f32[N], detached. clipped: bool[N], where a bound took effect."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


def policy_term(algorithm: Algorithm, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor,
                sequence: Tensor) -> PolicyTerm:
    """The term that `algorithm.policy_loss` names.

    Args:
        log_probs: f32[N] of the actor, with gradient.
        old_log_probs: f32[N], the proximal ones, a constant.
        advantages: f32[N].
        mask: bool[N], true on sampled tokens; log-probs elsewhere are 0.
        sequence: int64[N], equal for the tokens of one sequence.
    """
    log_ratio = log_probs - old_log_probs.detach()
    if algorithm.policy_loss == "ppo":
        return clipped_ratio(log_ratio, advantages, algorithm.clip)
    if algorithm.policy_loss == "gspo":
        return clipped_ratio(sequence_log_ratio(log_ratio, mask, sequence), advantages, algorithm.clip)
    ratio = safe_exp(log_ratio.detach())
    if algorithm.policy_loss == "cispo":
        return clipped_weight(log_probs, ratio, advantages, algorithm.clip)
    if algorithm.policy_loss == "reinforce":  # Williams 1992
        return PolicyTerm(-advantages * log_probs, ratio, torch.zeros_like(mask))
    raise ValueError(f"policy loss {algorithm.policy_loss!r} is unknown: use ppo, gspo, cispo or reinforce")


def clipped_ratio(log_ratio: Tensor, advantages: Tensor, clip: Clip) -> PolicyTerm:
    """-min(r A, clip(r, 1 - low, 1 + high) A): PPO (Schulman et al. 2017).

    Bounds of different distance are DAPO's clip-higher (Yu et al. 2025). With clip.dual = c, the loss of a negative
    advantage is at most c |A| (Ye et al. 2020, "Mastering Complex Control in MOBA Games").
    """
    ratio = safe_exp(log_ratio)
    plain = ratio * advantages
    bounded = ratio.clamp(1.0 - clip.low, 1.0 + clip.high) * advantages
    loss, clipped = -torch.minimum(plain, bounded), bounded < plain
    if clip.dual is not None:
        most = -clip.dual * advantages
        beyond = (advantages < 0) & (loss > most)
        loss, clipped = torch.where(beyond, most, loss), clipped | beyond
    return PolicyTerm(loss, ratio.detach(), clipped)


def sequence_log_ratio(log_ratio: Tensor, mask: Tensor, sequence: Tensor) -> Tensor:
    """Logarithm of the sequence's ratio, the mean of its tokens', with each token's own gradient: GSPO-token.

    Zheng et al. 2025, "Group Sequence Policy Optimization". Where the advantages of a sequence are equal, loss and
    gradient are those of the paper's GSPO.
    """
    tokens = sequence_sum(mask.to(log_ratio.dtype), sequence).clamp(min=1.0)
    mean = sequence_sum(log_ratio.detach(), sequence) / tokens
    return mean + (log_ratio - log_ratio.detach())


def clipped_weight(log_probs: Tensor, ratio: Tensor, advantages: Tensor, clip: Clip) -> PolicyTerm:
    """-clip(r, 1 - low, 1 + high) A log p, with no gradient through the ratio: CISPO (MiniMax 2025, "MiniMax-M1").

    Every token keeps a gradient, also those whose ratio is clipped.
    """
    weight = ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    return PolicyTerm(-weight * advantages * log_probs, ratio, weight != ratio)
