"""Log-probabilities and entropy of given tokens from logits that are split over the vocabulary.

No rank ever sees another rank's logits: per token, one maximum and three sums cross the tensor-parallel group. Only
torch.distributed is used, so the functions also work on one process without a group.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

CHUNK_ELEMENTS = 1 << 25
"""fp32 elements of one temporary (128 MiB): tokens are processed in chunks of so many logits."""


@dataclass(frozen=True)
class VocabShard:
    """Which vocabulary columns this rank's logits are."""

    start: int
    """Vocabulary id of column 0."""
    vocab: int
    """True size of the vocabulary: columns from it on are padding and do not take part."""
    group: dist.ProcessGroup | None = None
    """Tensor-parallel group; None: the logits are not split."""

    def columns(self, logits: torch.Tensor) -> int:
        """Number of leading columns of this shard that are not padding (0 on a shard of padding alone)."""
        return min(max(self.vocab - self.start, 0), logits.shape[-1])

    def all_reduce(self, tensor: torch.Tensor, op=dist.ReduceOp.SUM) -> None:
        """In place, over the group."""
        if self.group is not None:
            dist.all_reduce(tensor, op=op, group=self.group)


def log_probs_and_entropy(
    logits: torch.Tensor, targets: torch.Tensor, shard: VocabShard, temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(target) and entropy, both in nats, of softmax(logits / temperature) over the true vocabulary.

    Args:
        logits: [N, local columns], any float dtype; the arithmetic is fp32.
        targets: int64 [N], ids in the true vocabulary.
        shard: which columns these are.
        temperature: > 0; applied before the softmax.

    Returns:
        Two fp32 [N] tensors, equal on all ranks of the group, both differentiable with respect to this rank's logits.
        The gradient has the logits' dtype and is 0 in padding columns.

    Raises:
        ValueError: temperature <= 0.
    """
    if temperature <= 0:
        raise ValueError(f"log-probabilities need rollout.sampling.temperature > 0, not {temperature}")
    return _VocabParallel.apply(logits, targets, shard, temperature)


class _VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, shard: VocabShard, temperature: float):
        columns = shard.columns(logits)
        maximum = logits.new_full((len(logits),), -torch.inf, dtype=torch.float32)
        # Rows: Σ exp(x - max), Σ exp(x - max) (x - max), and the target's x; the first two with the local maximum.
        sums = logits.new_zeros((3, len(logits)), dtype=torch.float32)
        for rows in _chunks(logits):
            if columns == 0:
                break
            x = logits[rows, :columns].float() / temperature
            maximum[rows] = x.amax(dim=-1)
            local = targets[rows] - shard.start
            here = (local >= 0) & (local < columns)
            picked = x.gather(1, local.clamp(0, columns - 1)[:, None])[:, 0]
            sums[2, rows] = torch.where(here, picked, 0.0)
            x -= maximum[rows, None]
            weight = x.exp()
            sums[0, rows] = weight.sum(-1)
            sums[1, rows] = (weight * x).sum(-1)
        local_maximum = maximum.clone()
        shard.all_reduce(maximum, dist.ReduceOp.MAX)
        if columns:
            shift = local_maximum - maximum
            scale = shift.exp()
            sums[1] = scale * (sums[1] + shift * sums[0])
            sums[0] *= scale
        shard.all_reduce(sums)
        log_sum = sums[0].log()
        entropy = log_sum - sums[1] / sums[0]
        ctx.save_for_backward(logits, targets, maximum, log_sum, entropy)
        ctx.shard, ctx.temperature = shard, temperature
        # In this order: the maximum may be so large that log_sum would vanish in their sum.
        return sums[2] - maximum - log_sum, entropy

    @staticmethod
    def backward(ctx, grad_log_prob, grad_entropy):
        logits, targets, maximum, log_sum, entropy = ctx.saved_tensors
        shard, temperature = ctx.shard, ctx.temperature
        columns = shard.columns(logits)
        grad = torch.zeros_like(logits)
        for rows in _chunks(logits):
            if columns == 0:
                break
            # With p = softmax: d log p(t) / dx_j = [j = t] - p_j and d entropy / dx_j = -p_j (log p_j + entropy).
            log_p = logits[rows, :columns].float() / temperature
            log_p.sub_(maximum[rows, None]).sub_(log_sum[rows, None])
            p = log_p.exp()
            g = grad_log_prob[rows, None] + grad_entropy[rows, None] * (log_p + entropy[rows, None])
            g.mul_(p).neg_()
            local = targets[rows] - shard.start
            here = (local >= 0) & (local < columns)
            g.scatter_add_(1, local.clamp(0, columns - 1)[:, None],
                           torch.where(here, grad_log_prob[rows], 0.0)[:, None])
            grad[rows, :columns] = (g / temperature).to(grad.dtype)
        return grad, None, None, None


def _chunks(logits: torch.Tensor) -> list[slice]:
    step = max(1, CHUNK_ELEMENTS // logits.shape[1])
    return [slice(start, start + step) for start in range(0, len(logits), step)]
