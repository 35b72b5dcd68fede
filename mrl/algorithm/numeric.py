"""Small pieces that several terms need: an exponential that cannot overflow, sums over packed sequences."""
from __future__ import annotations

import math

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


def sequence_sum(values: Tensor, sequence: Tensor) -> Tensor:
    """The sum over the tokens of the same sequence, at each of them. [N], int64[N] in [0, N) -> [N]."""
    # In double, the order in which a GPU adds them up does not show.
    totals = torch.zeros(len(values), dtype=torch.float64, device=values.device)
    return totals.index_add(0, sequence, values.double())[sequence].to(values.dtype)
