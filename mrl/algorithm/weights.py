"""The normalisation contract: one weight per token, computed once over the global batch.

The loss of a minibatch is the plain sum of weight x per-token loss. Nothing downstream divides by anything, so neither
the split into microbatches nor the data-parallel size can change the gradient.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean"]


def token_weights(masks: Sequence[Tensor], aggregation: Aggregation,
                  minibatch_ids: Sequence[int] | None = None) -> list[Tensor]:
    """Weight of every token of every sequence; within one minibatch the weights sum to 1.

    token_mean:    1 / N with N the sampled tokens of the minibatch (DAPO, Yu et al. 2025).
    sequence_mean: 1 / (S * n) with n the sampled tokens of the sequence and S the sequences of the minibatch that
                   have any (the mean over sequences of the mean over tokens; GRPO, Shao et al. 2024).

    Args:
        masks: one bool[T] per sequence, over the global batch; true on sampled tokens.
        aggregation: how per-token losses become one number.
        minibatch_ids: the minibatch each sequence belongs to; None: all in one.

    Returns:
        one f32[T] per sequence, 0 where the mask is false. A sequence without sampled tokens (an empty completion)
        contributes nothing and is not counted in S; a minibatch of only such sequences has all weights 0.

    Raises:
        ValueError: a mask is not bool[T], minibatch_ids has another length, or the aggregation is unknown.
    """
    minibatch_ids = [0] * len(masks) if minibatch_ids is None else list(minibatch_ids)
    if len(minibatch_ids) != len(masks):
        raise ValueError(f"{len(masks)} masks but {len(minibatch_ids)} minibatch ids")
    for index, mask in enumerate(masks):
        if mask.dtype != torch.bool or mask.ndim != 1:
            raise ValueError(f"masks[{index}] must be bool[T], got {mask.dtype}{list(mask.shape)}")

    lengths = [int(mask.sum()) for mask in masks]
    tokens: dict[int, int] = {}
    sequences: dict[int, int] = {}
    for minibatch, length in zip(minibatch_ids, lengths):
        tokens[minibatch] = tokens.get(minibatch, 0) + length
        sequences[minibatch] = sequences.get(minibatch, 0) + (length > 0)

    def weight(minibatch: int, length: int) -> float:
        if length == 0:
            return 0.0
        if aggregation == "token_mean":
            return 1.0 / tokens[minibatch]
        if aggregation == "sequence_mean":
            return 1.0 / (sequences[minibatch] * length)
        raise ValueError(f"aggregation {aggregation!r} is unknown: use token_mean or sequence_mean")

    return [mask.float() * weight(minibatch, length)
            for mask, minibatch, length in zip(masks, minibatch_ids, lengths)]
