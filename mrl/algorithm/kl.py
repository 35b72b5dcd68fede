"""Divergence from the reference: per-token estimators, and the coefficient that adapts."""
from __future__ import annotations

import torch
from torch import Tensor

from mrl.algorithm.numeric import safe_exp
from mrl.config.algorithm import Estimator, Kl

_LARGEST_ERROR = 0.2


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, estimator: Estimator,
                straight_through: bool = False) -> Tensor:
    """Per-token estimate of KL(actor || reference) in nats (Schulman 2020, "Approximating KL Divergence").

    With d = log_probs - ref_log_probs: k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d. All have a gradient for every d. On
    on-policy samples the expected gradient of k2 is that of the KL, that of k1 is 0, and that of k3 is another one, of
    the reverse KL.

    Args:
        log_probs: f32[N] of the actor, with gradient.
        ref_log_probs: f32[N] of the reference, a constant.
        straight_through: the value is the estimator's, the gradient is k2's.

    Returns:
        f32[N].
    """
    drift = log_probs - ref_log_probs.detach()
    if straight_through:
        right = drift.square() / 2
        return _value(drift.detach(), estimator) + right - right.detach()
    return _value(drift, estimator)


def _value(drift: Tensor, estimator: Estimator) -> Tensor:
    if estimator == "k1":
        return drift
    if estimator == "k2":
        return drift.square() / 2
    if estimator == "k3":
        # expm1 near 0: exp(-d) - 1 + d loses all digits to cancellation for small d in fp32.
        growth = torch.where(drift.abs() < 1.0, torch.expm1(-drift.clamp(-1.0, 1.0)), safe_exp(-drift) - 1)
        return growth + drift
    raise ValueError(f"KL estimator {estimator!r} is unknown: use k1, k2 or k3")


def adapted_coef(coef: float, measured: float, samples: int, kl: Kl) -> float:
    """The coefficient of the next step: coef * (1 + e * samples / horizon), e = measured / target - 1 within ±0.2.

    Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences". Without a target it stays as it is.

    Args:
        coef: the coefficient of this step.
        measured: mean KL of this step's tokens, nats.
        samples: sequences of this step.
    """
    if kl.target is None:
        return coef
    error = min(max(measured / kl.target - 1.0, -_LARGEST_ERROR), _LARGEST_ERROR)
    return coef * (1.0 + error * samples / kl.horizon)
