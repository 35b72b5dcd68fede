"""Inside vLLM: mrl's worker extension, and beside it the way of others to take weights."""
from __future__ import annotations

import json
from typing import Any

import torch
from mrl_receiver.vllm import WeightReceiver

from .group import finish, join_group


class PeerReceiver(WeightReceiver):
    """Arguments are JSON. The trainer's side is `trainer.PerTensor`."""

    def peer_join(self, meeting: str) -> dict[str, Any]:
        """Meet the trainer: `join_group`'s arguments less the rank."""
        self._peer_group = join_group(rank=1 + self.rank, **json.loads(meeting))
        return {}

    def peer_load(self, tensors: str) -> dict[str, Any]:
        """Take each of [[name, dtype, shape], …] by itself: a broadcast, then a call of the engine's loader."""
        model = self.model_runner.model
        device = next(model.parameters()).device
        for name, dtype, shape in json.loads(tensors):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            self._peer_group.broadcast([tensor]).wait()
            model.load_weights([(name, tensor)])
        finish(device)
        return {}
