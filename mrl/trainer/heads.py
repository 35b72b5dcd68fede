"""Ends of a model in place of Megatron's projection onto the vocabulary."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig


class ValueHead(torch.nn.Module):
    """A critic's: a linear map from the hidden state to one value, in fp32 whatever the model's dtype, the same on all
    tp ranks.

    It starts at 0: the first values are 0 everywhere rather than noise, and no layout can change them.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=torch.float32, device=torch.cuda.current_device()))
        # A rank sees only its slice of the tokens then: Megatron sums the gradient over the tensor-parallel group.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: torch.Tensor, **_) -> tuple[torch.Tensor, None]:
        """[P or this rank's slice of P, 1, hidden] -> (values fp32 [P, 1, 1], no bias), as Megatron calls its own."""
        values = F.linear(hidden.float(), self.weight)
        if self.sequence_parallel:
            # Every rank computes the same loss from all values: what comes back is split, not summed.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


class HiddenStates(torch.nn.Module):
    """The hidden states themselves, all of them on every tensor-parallel rank; their log-probabilities are to be taken
    with this rank's columns of the projection, whose weight stays where `layer` had it: here, or in the embedding."""

    def __init__(self, layer: ColumnParallelLinear) -> None:
        super().__init__()
        self.sequence_parallel = layer.sequence_parallel
        self.register_parameter("weight", layer.weight)

    def forward(self, hidden: torch.Tensor, **_) -> tuple[torch.Tensor, None]:
        """[P or this rank's slice of P, 1, h] -> ([P, 1, h], no bias), as Megatron calls its own.

        Backward, the ranks' shares of the gradient are summed.
        """
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden), None
        return copy_to_tensor_model_parallel_region(hidden), None
