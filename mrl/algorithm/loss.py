"""The loss of a microbatch of packed tokens, assembled from the experiment's `algorithm` section.

    loss = sum_t w_t * (c_t * policy_t + kl_coef * KL_t - entropy_coef * H_t)

with the token weights w of the minibatch (`weights.py`), and the correction weight c on the policy term only. Proximal
log-probs and c depend on `algorithm.old_log_prob`:

    rollout:   the engine's log-probs. The ratio then already contains the mismatch between trainer and engine, so
               there is no extra correction: c = 1.
    recompute: the field old_log_prob, or, when it is absent, the forward pass at hand, detached. Absent is right only
               with one minibatch and one epoch; the caller decides. c as in `correction.py`.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mrl.algorithm.correction import effective_share, importance
from mrl.algorithm.kl import kl_estimate
from mrl.algorithm.policy import policy_term
from mrl.config.algorithm import Algorithm

Metrics = dict[str, Tensor]
LossFn = Callable[[Tensor, Tensor, Mapping[str, Tensor]], tuple[Tensor, Metrics]]


def make_loss(algorithm: Algorithm, kl_coef: float) -> LossFn:
    """The loss function of one microbatch: `loss_fn(log_probs, entropy, fields) -> (loss, metrics)`.

    `kl_coef`: the coefficient in force, which `kl.target` lets differ from `algorithm.kl.coef`.

    Args of loss_fn:
        log_probs: f32[N], the actor's, with gradient.
        entropy: f32[N] in nats (needs a gradient only when `entropy_coef` is not 0).
        fields: each [N]: loss_mask (bool), token_weight, mean_weight (1 / sampled tokens of the minibatch), advantage,
            rollout_log_prob, sequence (int64: which sequence of the microbatch); old_log_prob and ref_log_prob as
            configured. Masked positions may hold anything, NaN included.

    Returns of loss_fn:
        a scalar with gradient (0 with gradient 0 for a microbatch without sampled tokens), and detached scalar
        metrics. A metric is already weighted: its sum over microbatches and ranks is a mean over the tokens of the
        minibatch (policy_loss: what the loss holds). One whose name ends in `_max` is reduced with max instead.

    Raises of loss_fn:
        KeyError: a needed field is missing. ValueError: old_log_prob given although the proximal ones are the engine's.
    """

    def loss_fn(log_probs: Tensor, entropy: Tensor, fields: Mapping[str, Tensor]) -> tuple[Tensor, Metrics]:
        mask, sequence = fields["loss_mask"], fields["sequence"]

        def sampled(values: Tensor) -> Tensor:
            return torch.where(mask, values, 0.0)

        log_probs, entropy = sampled(log_probs), sampled(entropy)
        rollout, advantages = sampled(fields["rollout_log_prob"]), sampled(fields["advantage"])
        weights, shares = sampled(fields["token_weight"]), sampled(fields["mean_weight"])
        old = _proximal(algorithm, log_probs, rollout, fields, sampled)

        term = policy_term(algorithm, log_probs, old, advantages, mask, sequence)
        per_token, extra = term.loss, {}
        if algorithm.old_log_prob == "recompute" and algorithm.correction.kind != "none":
            found = importance(old, rollout, sequence, algorithm.correction)
            per_token = found.weight * per_token
            extra = {"importance_weight": (shares * found.weight).sum(),
                     "importance_square": (shares * found.weight.square()).sum(),
                     "importance_cut": (shares * found.cut).sum(),
                     "importance_max": _max(torch.where(mask, found.raw, 0.0))}
        loss = policy_loss = (weights * per_token).sum()
        mismatch = (log_probs.detach() - rollout).abs()
        if algorithm.kl.coef > 0:
            reference = sampled(_field(fields, "ref_log_prob", "kl.coef > 0"))
            kl = kl_estimate(log_probs, reference, algorithm.kl.estimator, algorithm.kl.straight_through)
            extra["kl"] = (shares * kl).sum()
            if algorithm.kl.place == "loss":
                loss = loss + kl_coef * (weights * kl).sum()
        if algorithm.entropy_coef != 0:
            loss = loss - algorithm.entropy_coef * (weights * entropy).sum()
        metrics = {
            "policy_loss": policy_loss,
            "entropy": (shares * entropy).sum(),
            "clip_fraction": (shares * term.clipped).sum(),
            "ratio": (shares * term.ratio).sum(),
            "logprob_diff": (shares * mismatch).sum(),
            "logprob_diff_max": _max(mismatch),
            **extra,
        }
        return loss, {name: value.detach() for name, value in metrics.items()}

    return loss_fn


def finished(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics of a whole minibatch, as they are logged: with the effective sample size, which no sum can hold."""
    logged = dict(metrics)
    if "importance_square" in logged:
        logged["importance_ess"] = effective_share(logged["importance_weight"], logged.pop("importance_square"))
    return logged


def _proximal(algorithm: Algorithm, log_probs: Tensor, rollout: Tensor, fields: Mapping[str, Tensor],
              sampled: Callable[[Tensor], Tensor]) -> Tensor:
    """Proximal log-probs: f32[N] without gradient."""
    if algorithm.old_log_prob == "recompute":
        return sampled(fields["old_log_prob"]) if "old_log_prob" in fields else log_probs.detach()
    if "old_log_prob" in fields:
        raise ValueError("field old_log_prob given, but algorithm.old_log_prob is rollout: "
                         "set it to recompute or leave the field out")
    return rollout


def _max(values: Tensor) -> Tensor:
    return values.max() if values.numel() else values.sum()


def _field(fields: Mapping[str, Tensor], name: str, why: str) -> Tensor:
    if name not in fields:
        raise KeyError(f"field {name} is missing, needed because {why}; present: {', '.join(sorted(fields))}")
    return fields[name]
