"""Importance weights of tokens that the engine sampled: its numerics and its weights are not the trainer's."""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.algorithm.numeric import safe_exp, sequence_sum
from mrl.config.algorithm import Correction


@dataclass(frozen=True)
class Importance:
    """All [N] and without gradient. weight: f32, to multiply the policy term with. raw: f32, before any cut.
    cut: bool, where the two differ."""

    weight: Tensor
    raw: Tensor
    cut: Tensor


def importance(old_log_probs: Tensor, rollout_log_probs: Tensor, sequence: Tensor,
               correction: Correction) -> Importance:
    """The weights p_trainer / p_engine of tokens, or of whole sequences, cut as `correction` says.

    kind truncate keeps them within [floor, cap] (Ionides 2008; Yao et al. 2025, "Your Efficient RL Framework Secretly
    Brings You Off-Policy RL Training"). kind mask replaces those outside by 0 (Ling Team 2025, IcePop). A token of
    weight 0 still counts wherever tokens are counted: it is an estimate that came out as 0.

    Args:
        old_log_probs, rollout_log_probs: f32[N] by trainer and engine, both 0 at masked positions.
        sequence: int64[N], equal for the tokens of one sequence.
    """
    log_weight = (old_log_probs - rollout_log_probs).detach()
    if correction.level == "sequence":
        log_weight = sequence_sum(log_weight, sequence)
    raw = safe_exp(log_weight)
    cut = (raw < correction.floor) | (raw > correction.cap)
    weight = torch.where(cut, 0.0, raw) if correction.kind == "mask" else raw.clamp(correction.floor, correction.cap)
    return Importance(weight, raw, cut)


def effective_share(mean: float, mean_square: float) -> float:
    """Effective sample size of importance weights over their number, (E w)^2 / E w^2: 1 when all are equal.

    Kong 1992. 0 when all weights are 0.
    """
    return mean * mean / mean_square if mean_square > 0 else 0.0
