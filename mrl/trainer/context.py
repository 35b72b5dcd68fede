"""Context parallelism: the tokens of a packed row, dealt to several ranks and put together again.

Every sequence is cut into 2 * cp equal chunks, of which rank r holds chunks r and 2 * cp - 1 - r: of causal attention,
whose cost grows towards a sequence's end, all ranks then have the same share (Transformer Engine's and Megatron's rule
for packed sequences). Sequences must be padded to a multiple of 2 * cp.
"""
from __future__ import annotations

import torch
import torch.distributed as dist


def rows_of(cu_seqlens: torch.Tensor, tokens: int, cp: int, rank: int) -> torch.Tensor:
    """Rows of the whole packed tensor that rank `rank` of `cp` holds, in its order: int64 [tokens / cp].

    cu_seqlens: int32 [sequences + 1], starts of the padded sequences in the whole tensor, then its length, `tokens`.
    """
    starts = cu_seqlens.long()
    index = torch.arange(tokens // cp, device=starts.device)
    sequence = torch.bucketize(index, starts[1:] // cp, right=True)
    offset, chunk = index - starts[sequence] // cp, starts.diff()[sequence] // (2 * cp)
    return starts[sequence] + torch.where(offset < chunk, rank * chunk + offset, (2 * cp - 2 - rank) * chunk + offset)


def gather_whole(part: torch.Tensor, cu_seqlens: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The whole tensor from every rank's part: [tokens / cp, …] -> [tokens, …], for ranks that go on differently.

    In the backward pass a row's gradient is the sum of all ranks'.
    """
    return _Gather.apply(part, cu_seqlens, group, True)


def gather_same(part: torch.Tensor, cu_seqlens: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """As `gather_whole`, where all ranks compute the same from it: a row's gradient is this rank's own."""
    return _Gather.apply(part, cu_seqlens, group, False)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, cu_seqlens, group, add: bool):
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        tokens = len(parts) * len(part)
        rows = [rows_of(cu_seqlens, tokens, len(parts), rank) for rank in range(len(parts))]
        ctx.group, ctx.add, ctx.rows = group, add, rows[group.rank()]
        whole = part.new_empty(tokens, *part.shape[1:])
        return whole.index_copy_(0, torch.cat(rows), torch.cat(parts))

    @staticmethod
    def backward(ctx, grad):
        if ctx.add:
            grad = grad.clone()
            dist.all_reduce(grad, group=ctx.group)
        return grad.index_select(0, ctx.rows), None, None, None
