"""GRPO's loss over packed tokens, assembled from the experiment's `algorithm` section.

    loss = sum_t w_t * (c_t * policy_t + kl.coef * KL_t - entropy_coef * H_t)

with token weights w that sum to 1 over the minibatch and the correction weight c on the policy term only. Proximal
log-probs and c depend on `algorithm.old_log_prob`:

    rollout:   the engine's log-probs. The ratio then already contains the mismatch between trainer and engine, so
               there is no extra correction: c = 1.
    recompute: the field old_log_prob, or, when it is absent, the forward pass at hand, detached. Absent is right only
               with one minibatch and one epoch; the caller decides. c = min(exp(old - rollout), cap), or 1 if
               `correction.kind` is none.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mrl.algorithm.losses import importance_weights, kl_penalty, policy_loss
from mrl.config.algorithm import Algorithm

Metrics = dict[str, Tensor]
LossFn = Callable[[Tensor, Tensor, Mapping[str, Tensor]], tuple[Tensor, Metrics]]


def make_loss(algorithm: Algorithm) -> LossFn:
    """The loss function of one microbatch: `loss_fn(log_probs, entropy, fields) -> (loss, metrics)`.

    Args of loss_fn:
        log_probs: f32[N], the actor's, with gradient.
        entropy: f32[N] in nats (needs a gradient only when `entropy_coef` is not 0).
        fields: each [N]: loss_mask (bool), token_weight, advantage, rollout_log_prob; old_log_prob and ref_log_prob
            as configured. Masked positions may hold anything, NaN included.

    Returns of loss_fn:
        a scalar with gradient (0 with gradient 0 for a microbatch without sampled tokens), and detached scalar
        metrics. A metric is already weighted: its sum over microbatches and ranks is a mean over the minibatch. One
        whose name ends in `_max` is reduced with max instead.

    Raises of loss_fn:
        KeyError: a needed field is missing. ValueError: old_log_prob given although the proximal ones are the engine's.
    """

    def loss_fn(log_probs: Tensor, entropy: Tensor, fields: Mapping[str, Tensor]) -> tuple[Tensor, Metrics]:
        mask = fields["loss_mask"]

        def sampled(values: Tensor) -> Tensor:
            return torch.where(mask, values, 0.0)

        log_probs, entropy = sampled(log_probs), sampled(entropy)
        rollout, advantages = sampled(fields["rollout_log_prob"]), sampled(fields["advantage"])
        weights = sampled(fields["token_weight"])
        proximal, correction = _proximal(algorithm, log_probs, rollout, fields, sampled)

        per_token, ratio, clipped = policy_loss(log_probs, proximal, advantages,
                                                algorithm.clip.low, algorithm.clip.high)
        policy = (weights * correction * per_token).sum()
        loss = policy
        mismatch = (log_probs.detach() - rollout).abs()
        metrics = {
            "policy_loss": policy,
            "entropy": (weights * entropy).sum(),
            "clip_fraction": (weights * clipped).sum(),
            "ratio": (weights * ratio).sum(),
            "importance_weight": (weights * correction).sum(),
            "logprob_diff": (weights * mismatch).sum(),
            "logprob_diff_max": mismatch.max() if mismatch.numel() else mismatch.sum(),
        }
        if algorithm.kl.coef > 0:
            metrics["kl"] = (weights * kl_penalty(log_probs, sampled(_field(fields, "ref_log_prob", "kl.coef > 0")),
                                                  algorithm.kl.estimator)).sum()
            loss = loss + algorithm.kl.coef * metrics["kl"]
        if algorithm.entropy_coef != 0:
            loss = loss - algorithm.entropy_coef * metrics["entropy"]
        return loss, {name: value.detach() for name, value in metrics.items()}

    return loss_fn


def _proximal(algorithm: Algorithm, log_probs: Tensor, rollout: Tensor, fields: Mapping[str, Tensor],
              sampled: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Proximal log-probs and correction weights, both f32[N] and without gradient."""
    if algorithm.old_log_prob == "rollout":
        if "old_log_prob" in fields:
            raise ValueError("field old_log_prob given, but algorithm.old_log_prob is rollout: "
                             "set it to recompute or leave the field out")
        return rollout, torch.ones_like(rollout)
    old = sampled(fields["old_log_prob"]) if "old_log_prob" in fields else log_probs.detach()
    if algorithm.correction.kind == "none":
        return old, torch.ones_like(old)
    return old, importance_weights(old, rollout, algorithm.correction.cap)


def _field(fields: Mapping[str, Tensor], name: str, why: str) -> Tensor:
    if name not in fields:
        raise KeyError(f"field {name} is missing, needed because {why}; present: {', '.join(sorted(fields))}")
    return fields[name]
