"""Router replay: tokens go to the experts that the engine chose for them, with the trainer's own weights for these.

A router of Megatron's that has a `router_replay` asks it for the choice. Which microbatch it asks for, the layer
around it knows: a hook hands the layer's share over before every forward pass, those of recomputation included.
"""
from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any, Callable, Iterable, Mapping

import torch

OWN = -1
"""In place of experts: the token goes where the router sends it."""


class Replay:
    """What one router asks.

    repeats: whether the router runs again in backward passes by itself, without the layer around it. It then needs the
    choices of the microbatches under way once more, in the same order.
    """

    def __init__(self, repeats: bool) -> None:
        self.repeats = repeats
        self._given: list[torch.Tensor | None] = []
        self._under_way: deque[torch.Tensor | None] = deque()

    def give(self, experts: torch.Tensor | None, training: bool) -> None:
        """For the next forward pass: [tokens of this rank, experts a token], or None: as the router chooses."""
        self._given = [experts]
        if self.repeats and training:
            self._under_way.append(experts)

    def get_replay_topk(self, scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None,
                        default_compute_topk: Callable) -> tuple[torch.Tensor, torch.Tensor]:
        """(scores of the chosen experts, their numbers), both [tokens, topk]: a name and signature of Megatron's."""
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        experts = self._given.pop() if self._given else self._under_way.popleft()
        if experts is None:
            return values, own
        chosen = torch.where(experts == OWN, own, experts.long())
        return scores.gather(1, chosen), chosen


def install(chunks: Iterable[torch.nn.Module], dense_layers: int, repeats: bool) -> None:
    """Give every router of the model's chunks a `Replay`, which is fed from `PackedSequences.experts`.

    dense_layers: how many layers, the first of the model, have no experts.
    """
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            if (router := getattr(layer.mlp, "router", None)) is not None:
                router.router_replay = Replay(repeats)
                feed = partial(_feed, router.router_replay, layer.layer_number - 1 - dense_layers)
                layer.register_forward_pre_hook(feed, with_kwargs=True)


def _feed(replay: Replay, index: int, layer: torch.nn.Module, _args: Any, kwargs: Mapping[str, Any]) -> None:
    experts = kwargs["packed_seq_params"].experts
    replay.give(None if experts is None else experts[:, index], layer.training)
