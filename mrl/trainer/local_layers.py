"""Layers used where Transformer Engine is not: RMS norm, and attention over packed sequences on torch's SDPA.

Megatron's own local layers know neither sequence parallelism (norm) nor packed sequences (attention).
"""
from __future__ import annotations

from functools import cached_property

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from mrl.trainer.context import gather_whole, rows_of


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm with a learned scale, computed in fp32 inside torch.

    Under sequence parallelism a rank sees only its slice of the tokens: the mark tells Megatron to sum the gradient of
    the scale over the tensor-parallel group.
    """

    def __init__(self, config, hidden_size: int, eps: float, **_) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight.sequence_parallel = config.sequence_parallel


class PackedSequences(PackedSeqParams):
    """Megatron's description of packed sequences, plus their grouping for padded attention, computed once per use."""

    experts: torch.Tensor | None = None
    """int16 [tokens of this rank, layers with experts, experts a token], -1: as the router chooses; None: all so."""

    @cached_property
    def padded_groups(self) -> list[tuple[torch.Tensor, torch.Tensor, int, int]]:
        """Sequences grouped by length, within a factor of two, so that padding never more than doubles the work.

        Returns one (source, target, n, longest) per group: rows `source` [tokens] of the packed tensor go to rows
        `target` [tokens] of a zeroed [n * longest] tensor; both int64.
        """
        starts = self.cu_seqlens_q.tolist()
        groups: dict[int, list[tuple[int, int]]] = {}
        for start, stop in zip(starts, starts[1:]):
            if stop > start:
                groups.setdefault((stop - start - 1).bit_length(), []).append((start, stop))
        device = self.cu_seqlens_q.device
        return [(*_rows(spans, device), len(spans), max(stop - start for start, stop in spans))
                for spans in groups.values()]


def _rows(spans: list[tuple[int, int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed and padded row numbers of every token of the sequences `spans`."""
    begin = torch.tensor([start for start, _ in spans])
    length = torch.tensor([stop for _, stop in spans]) - begin
    offset = torch.arange(int(length.sum())) - torch.repeat_interleave(length.cumsum(0) - length, length)
    source = torch.repeat_interleave(begin, length) + offset
    target = torch.repeat_interleave(torch.arange(len(spans)) * int(length.max()), length) + offset
    return source.to(device), target.to(device)


class SDPACoreAttention(torch.nn.Module):
    """Causal grouped-query attention in which no sequence of the pack sees another.

    The signature is Megatron's for a core attention; what dense causal decoders never set is accepted and unused.
    """

    def __init__(self, config, layer_number: int, attn_mask_type, attention_type, softmax_scale=None, **_) -> None:
        super().__init__()
        self.scale, self.context_parallel_size = softmax_scale, config.context_parallel_size

    def forward(self, query, key, value, attention_mask, *, packed_seq_params: PackedSequences, **_) -> torch.Tensor:
        """query [tokens, heads, d]; key [tokens, kv_heads, d], value [tokens, kv_heads, dv] -> [tokens, heads * dv].

        Under context parallelism `tokens` are this rank's. It then attends for all tokens and keeps its own: as right
        as sharing that work out, which takes Transformer Engine.
        """
        if self.context_parallel_size == 1:
            return self._attend_packed(query, key, value, packed_seq_params)
        group, starts = parallel_state.get_context_parallel_group(), packed_seq_params.cu_seqlens_q
        whole = (gather_whole(x, starts, group) for x in (query, key, value))
        rows = rows_of(starts, len(query) * group.size(), group.size(), group.rank())
        return self._attend_packed(*whole, packed_seq_params).index_select(0, rows)

    def _attend_packed(self, query, key, value, packed_seq_params: PackedSequences) -> torch.Tensor:
        groups = packed_seq_params.padded_groups
        if len(groups) == 1:
            source, target, n, longest = groups[0]
            return self._attend(query, key, value, target, n, longest).flatten(1)
        out = value.new_zeros(*query.shape[:2], value.shape[2])
        for source, target, n, longest in groups:
            rows = (x.index_select(0, source) for x in (query, key, value))
            out = out.index_copy(0, source, self._attend(*rows, target, n, longest))
        return out.flatten(1)

    def _attend(self, query, key, value, target: torch.Tensor, n: int, longest: int) -> torch.Tensor:
        """Pad to [n, heads, longest, d], attend, un-pad. Padding follows the real tokens, so causality hides it."""
        repeat = query.shape[1] // key.shape[1]

        def pad(x: torch.Tensor) -> torch.Tensor:
            rows = x.new_zeros(n * longest, *x.shape[1:]).index_copy(0, target, x)
            return rows.view(n, longest, *x.shape[1:]).transpose(1, 2)

        key, value = (x.repeat_interleave(repeat, dim=1) if repeat > 1 else x for x in (key, value))
        out = F.scaled_dot_product_attention(pad(query), pad(key), pad(value), is_causal=True, scale=self.scale)
        return out.transpose(1, 2).reshape(n * longest, query.shape[1], -1).index_select(0, target)
