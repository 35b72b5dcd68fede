"""The critic's loss over packed tokens, and how well its values explain the returns."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from mrl.config.algorithm import Critic

ValueLossFn = Callable[[Tensor, Mapping[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """Half the squared error, of the value or of the value clipped around the old one, whichever is larger.

    max((V - R)², (V_old + clamp(V - V_old, -clip, clip) - R)²) / 2 (Schulman et al., OpenAI baselines "ppo2", 2017): a
    value that has moved towards its return by more than `clip` gets no gradient until the next batch.

    Args:
        values: f32[N] of the critic, with gradient.
        old_values: f32[N], before the first minibatch.
        returns: f32[N], what the values should be.
        clip: > 0; None: no clipping.

    Returns:
        loss f32[N]; clipped bool[N], true where the bound took the gradient away.
    """
    plain = (values - returns).square() / 2
    if clip is None:
        return plain, torch.zeros_like(plain, dtype=torch.bool)
    near = old_values + (values - old_values).clamp(-clip, clip)
    bounded = (near - returns).square() / 2
    return torch.maximum(plain, bounded), (bounded > plain).detach()


def make_value_loss(critic: Critic) -> ValueLossFn:
    """The loss function of one microbatch: `loss_fn(values, fields) -> (loss, metrics)`.

    Args of loss_fn:
        values: f32[N] of the critic, with gradient.
        fields: each [N]: loss_mask (bool), mean_weight (1 / sampled tokens of the minibatch), value (the old one),
            return. Masked positions may hold anything, NaN included.

    Returns of loss_fn:
        Σ mean_weight · loss, whatever `algorithm.aggregation` does to the policy's, and detached scalar metrics,
        weighted likewise: their sums over microbatches and ranks are means over the tokens of the minibatch.
    """

    def loss_fn(values: Tensor, fields: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        mask = fields["loss_mask"]

        def sampled(field: Tensor) -> Tensor:
            return torch.where(mask, field, 0.0)

        weights, values = sampled(fields["mean_weight"]), sampled(values)
        per_token, clipped = value_loss(values, sampled(fields["value"]), sampled(fields["return"]), critic.value_clip)
        loss = (weights * per_token).sum()
        return loss, {"value_loss": loss.detach(), "clip_fraction": (weights * clipped).sum()}

    return loss_fn


def value_metrics(values: Sequence[Tensor], returns: Sequence[Tensor], masks: Sequence[Tensor]) -> dict[str, float]:
    """How values and returns lie over the sampled tokens of a whole batch; one f32[T] or bool[T] a sequence.

    explained_variance is 1 - Var(R - V) / Var(R): 1 is perfect, 0 no better than a constant; 0 where the returns do not
    vary and there is nothing to explain. Everything is 0 without sampled tokens.
    """
    kept = [torch.stack([v[mask], r[mask]]) for v, r, mask in zip(values, returns, masks, strict=True)]
    value, target = torch.cat(kept, dim=1).double()
    if not target.numel():
        return {"value": 0.0, "return": 0.0, "explained_variance": 0.0}
    spread, error = float(target.var(correction=0)), float((target - value).var(correction=0))
    return {"value": float(value.mean()), "return": float(target.mean()),
            "explained_variance": 1.0 - error / spread if spread > 0 else 0.0}
