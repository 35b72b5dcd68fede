"""The normalisation contract: one weight per token, computed once over the global batch.

The loss of a minibatch is the plain sum of weight x per-token loss. Nothing downstream divides by anything, so neither
the split into microbatches nor the data-parallel size can change the gradient.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from mrl.config.algorithm import Aggregation


def token_weights(masks: Sequence[Tensor], aggregation: Aggregation, minibatch_ids: Sequence[int] | None = None,
                  group_ids: Sequence[int] | None = None, constant_tokens: int | None = None) -> list[Tensor]:
    """Weight of every token of every sequence, from what its minibatch holds: n sampled tokens of this sequence, N of
    all; S sequences that have any; N_g sampled tokens of its group; P groups that have any.

    token_mean:              1 / N (DAPO, Yu et al. 2025).
    sequence_mean:           1 / (S n), the mean over sequences of the mean over tokens (GRPO, Shao et al. 2024).
    sequence_mean_token_sum: 1 / S, the mean over sequences of the sum over tokens.
    prompt_mean:             1 / (P N_g), the mean over prompts of the mean over tokens (ScaleRL, Khatri et al. 2025).
    constant:                1 / (S constant_tokens) (Dr.GRPO, Liu et al. 2025).

    The weights of the three means sum to 1 over a minibatch.

    Args:
        masks: one bool[T] per sequence, over the global batch; true on sampled tokens.
        aggregation: how per-token losses become one number.
        minibatch_ids: the minibatch each sequence belongs to; None: all in one.
        group_ids: the group each sequence belongs to, needed by prompt_mean.
        constant_tokens: needed by constant.

    Returns:
        one f32[T] per sequence, 0 where the mask is false. A sequence without sampled tokens (an empty completion)
        contributes nothing and is not counted in S; a minibatch of only such sequences has all weights 0.

    Raises:
        ValueError: a mask is not bool[T], ids have another length or are missing, or the aggregation is unknown.
    """
    minibatches = [0] * len(masks) if minibatch_ids is None else list(minibatch_ids)
    groups = [0] * len(masks) if group_ids is None else list(group_ids)
    _check(masks, aggregation, minibatches, groups, group_ids, constant_tokens)
    lengths = [int(mask.sum()) for mask in masks]
    places = list(zip(minibatches, groups))
    tokens, group_tokens, sequences = Counter(), Counter(), Counter()
    for place, length in zip(places, lengths):
        tokens[place[0]] += length
        group_tokens[place] += length
        sequences[place[0]] += length > 0
    prompts = Counter(minibatch for (minibatch, _), count in group_tokens.items() if count)

    def divisor(place: tuple[int, int], length: int) -> int:
        minibatch = place[0]
        return {
            "token_mean": tokens[minibatch],
            "sequence_mean": sequences[minibatch] * length,
            "sequence_mean_token_sum": sequences[minibatch],
            "prompt_mean": prompts[minibatch] * group_tokens[place],
            "constant": sequences[minibatch] * (constant_tokens or 0),
        }[aggregation]

    return [mask.float() / divisor(place, length) if length else torch.zeros(len(mask))
            for mask, place, length in zip(masks, places, lengths)]


def _check(masks: Sequence[Tensor], aggregation: str, minibatches: list[int], groups: list[int],
           group_ids: Sequence[int] | None, constant_tokens: int | None) -> None:
    for name, ids in (("minibatch ids", minibatches), ("group ids", groups)):
        if len(ids) != len(masks):
            raise ValueError(f"{len(masks)} masks but {len(ids)} {name}")
    for index, mask in enumerate(masks):
        if mask.dtype != torch.bool or mask.ndim != 1:
            raise ValueError(f"masks[{index}] must be bool[T], got {mask.dtype}{list(mask.shape)}")
    if aggregation not in (known := get_args(Aggregation)):
        raise ValueError(f"aggregation {aggregation!r} is unknown: use one of {', '.join(known)}")
    if aggregation == "prompt_mean" and group_ids is None:
        raise ValueError("aggregation prompt_mean needs group_ids")
    if aggregation == "constant" and not constant_tokens:
        raise ValueError("aggregation constant needs constant_tokens, a number > 0")
