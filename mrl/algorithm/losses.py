"""Per-token loss terms. Every function maps f32[N] to f32[N] and leaves reduction to the caller's token weights.

No function here knows a mask: callers replace masked positions (`torch.where`) before calling, because a NaN that has
entered arithmetic survives multiplication by 0, in the value and in the gradient.
"""
from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

_EXP_LIMIT = 20.0


def safe_exp(x: Tensor) -> Tensor:
    """exp(x), continued as a straight line beyond x = 20: e^20 * (1 + x - 20). f32[N] -> f32[N].

    It never overflows for finite fp32 log-probs, and unlike a clamp it keeps value and gradient growing, so the force
    that pulls a policy back does not vanish exactly where the drift is worst.
    """
    near = x.clamp(max=_EXP_LIMIT).exp()
    beyond = math.exp(_EXP_LIMIT) * (x - _EXP_LIMIT).clamp(min=0.0)
    return near + beyond


def policy_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor,
                clip_low: float, clip_high: float) -> tuple[Tensor, Tensor, Tensor]:
    """Clipped policy-gradient loss (PPO, Schulman et al. 2017): -min(r A, clip(r, 1 - low, 1 + high) A).

    Args:
        log_probs: f32[N] of the actor, with gradient.
        old_log_probs: f32[N], the proximal log-probs; r = exp(log_probs - old_log_probs).
        advantages: f32[N].
        clip_low, clip_high: distances of the bounds from 1; different values are DAPO's clip-higher (Yu et al. 2025).

    Returns:
        loss f32[N]; ratio f32[N], detached; clipped bool[N], true where the bound took the gradient away.
    """
    ratio = safe_exp(log_probs - old_log_probs.detach())
    plain = ratio * advantages
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return -torch.minimum(plain, bounded), ratio.detach(), (bounded < plain).detach()


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Per-token estimate of KL(actor || reference) in nats (Schulman 2020, "Approximating KL Divergence").

    With d = log_probs - ref_log_probs: k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d. All have a gradient for every d.
    As a loss term k1 has a gradient of mean zero on on-policy samples; k2 and k3 pull towards the reference.

    Args:
        log_probs: f32[N] of the actor, with gradient.
        ref_log_probs: f32[N] of the frozen reference.

    Returns:
        f32[N].
    """
    drift = log_probs - ref_log_probs.detach()
    if estimator == "k1":
        return drift
    if estimator == "k2":
        return drift.square() / 2
    if estimator == "k3":
        # expm1 near 0: exp(-d) - 1 + d loses all digits to cancellation for small d in fp32.
        growth = torch.where(drift.abs() < 1.0, torch.expm1(-drift.clamp(-1.0, 1.0)), safe_exp(-drift) - 1)
        return growth + drift
    raise ValueError(f"KL estimator {estimator!r} is unknown: use k1, k2 or k3")


def importance_weights(old_log_probs: Tensor, rollout_log_probs: Tensor, cap: float) -> Tensor:
    """Truncated importance weight min(exp(old - rollout), cap) of each token, detached (Ionides 2008).

    It corrects for tokens having been sampled by the engine, whose numerics (and, in overlap, weights) differ from the
    trainer's.

    Args:
        old_log_probs: f32[N] by the trainer.
        rollout_log_probs: f32[N] by the engine.
        cap: upper truncation, > 0.

    Returns:
        f32[N] in (0, cap].
    """
    # Clamping the exponent instead of the result cannot overflow; nothing here needs a gradient.
    return (old_log_probs - rollout_log_probs).detach().clamp(max=math.log(cap)).exp().clamp(max=cap)
