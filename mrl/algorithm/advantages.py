"""Advantages of all tokens of a batch: how much better each turned out than was to be expected.

Computed at once over the whole batch, on one rank: nothing here knows replicas, minibatches or microbatches, so none of
them can change an advantage. In float64, whatever comes in.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.algorithm.groups import group_relative, leave_one_out, pass_at_k
from mrl.algorithm.returns import gae, returns_to_go, whiten
from mrl.config.algorithm import Algorithm


_NEEDED_BY = {"values": "gae needs from a critic", "divergence": "distill needs from a teacher"}


@dataclass(frozen=True)
class Scored:
    """One sampled sequence of T tokens, as far as advantages depend on it. Masked positions may hold anything.

    group: equal for the samples of one prompt. reward: of the whole sequence. mask: bool[T], true on sampled tokens.
    baseline: the reward of the prompt's greedy answer (remax). values: f32[T], the critic's value before each token
    (gae). penalty: f32[T], taken off the reward at each token (the KL from the reference times its coefficient).
    divergence: f32[T], the student's log-prob of each token less the teacher's (distill).
    """

    group: int
    reward: float
    mask: Tensor
    baseline: float | None = None
    values: Tensor | None = None
    penalty: Tensor | None = None
    divergence: Tensor | None = None


@dataclass(frozen=True)
class Estimate:
    """advantage, returns: f32[T], 0 at masked positions. returns: what the critic is to learn; None without one."""

    advantage: Tensor
    returns: Tensor | None = None


def estimate(algorithm: Algorithm, sequences: Sequence[Scored]) -> list[Estimate]:
    """Advantages of every token of every sequence, by `algorithm.name`; always finite.

    A sequence without sampled tokens has none, but its reward counts in its group.

    Raises:
        ValueError: a reward, or a value at a sampled token, is NaN or infinite, or something needed is missing. The
            message says what, and of which sequence.
    """
    if not sequences:
        return []
    rewards = torch.tensor([s.reward for s in sequences], dtype=torch.float64)
    _require_finite(rewards, "reward")
    penalties = [_sampled(sequences, index, "penalty") if s.penalty is not None
                 else torch.zeros(int(s.mask.sum()), dtype=torch.float64) for index, s in enumerate(sequences)]
    returns = None
    if algorithm.name == "gae":
        values = [_sampled(sequences, index, "values") for index in range(len(sequences))]
        pairs = [gae(_with_outcome(reward, penalty), value, algorithm.gae.gamma, algorithm.gae.lam)
                 for reward, penalty, value in zip(rewards, penalties, values)]
        advantages, returns = zip(*pairs)
    else:
        advantages = _without_critic(algorithm, sequences, rewards, penalties)
    if algorithm.whitens:
        flat = torch.cat(list(advantages))
        advantages = whiten(flat, torch.ones_like(flat)).split([len(penalty) for penalty in penalties])
    return [Estimate(_spread(advantage, s.mask), returns and _spread(returns[index], s.mask))
            for index, (advantage, s) in enumerate(zip(advantages, sequences))]


def _without_critic(algorithm: Algorithm, sequences: Sequence[Scored], rewards: Tensor,
                    penalties: list[Tensor]) -> list[Tensor]:
    """f64[n] of each sequence over its sampled tokens, before whitening."""
    if algorithm.name == "distill":  # a token answers for itself alone
        return [-_sampled(sequences, index, "divergence") for index in range(len(sequences))]
    groups = torch.tensor([s.group for s in sequences])
    if algorithm.name in ("grpo", "rloo", "pass_at_k"):  # a whole response is one action
        scores = rewards - torch.stack([penalty.sum() for penalty in penalties])
        compared = {
            "grpo": lambda: group_relative(scores, groups, algorithm.std),
            "rloo": lambda: leave_one_out(scores, groups),
            "pass_at_k": lambda: pass_at_k(scores, groups, algorithm.pass_k, algorithm.std),
        }[algorithm.name]()
        return [score.expand(len(penalty)) for score, penalty in zip(compared, penalties)]
    outcomes = {  # a token answers for what follows it
        "reinforce_plus_plus": lambda: rewards,
        "reinforce_plus_plus_baseline": lambda: group_relative(rewards, groups, "none"),
        "remax": lambda: rewards - _baselines(sequences),
    }[algorithm.name]()
    return [returns_to_go(_with_outcome(outcome, penalty)) for outcome, penalty in zip(outcomes, penalties)]


def _with_outcome(outcome: Tensor, penalty: Tensor) -> Tensor:
    """Rewards of the sampled tokens: minus the penalty, plus the outcome at the last one, whatever masked follow it."""
    rewards = -penalty
    rewards[-1:] += outcome
    return rewards


def _baselines(sequences: Sequence[Scored]) -> Tensor:
    missing = [index for index, s in enumerate(sequences) if s.baseline is None]
    if missing:
        raise ValueError(f"sequence {missing[0]} has no baseline, which algorithm.name remax needs: the reward of its "
                         "prompt's greedy answer")
    baselines = torch.tensor([s.baseline for s in sequences], dtype=torch.float64)
    _require_finite(baselines, "baseline")
    return baselines


def _sampled(sequences: Sequence[Scored], index: int, name: str) -> Tensor:
    """Field `name` of a sequence at its sampled tokens: f64[n]."""
    field = getattr(sequences[index], name)
    if field is None:
        raise ValueError(f"sequence {index} has no {name}, which algorithm.name {_NEEDED_BY[name]}")
    values = field[sequences[index].mask].double()
    _require_finite(values, f"sequence {index}: {name}")
    return values


def _require_finite(values: Tensor, what: str) -> None:
    broken = (~torch.isfinite(values)).nonzero().flatten().tolist()
    if broken:
        raise ValueError(f"{what}[{broken[0]}] is {values[broken[0]].item()} ({len(broken)} not finite in all): "
                         "every one must be a finite number")


def _spread(values: Tensor, mask: Tensor) -> Tensor:
    """f64[n] at the sampled tokens -> f32[T], 0 elsewhere."""
    return torch.zeros(len(mask)).masked_scatter(mask, values.float())
