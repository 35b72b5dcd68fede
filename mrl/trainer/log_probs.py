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
    _check(temperature)
    return _VocabParallel.apply(logits, targets, shard, temperature)


def projected_log_probs_and_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, shard: VocabShard, chunk: int,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`log_probs_and_entropy` of the logits hidden @ weight.T, of which only `chunk` rows exist at once.

    They are computed again in the backward pass. Megatron's flat buffer of gradients, where the weight has one
    (`main_grad`), receives what all chunks but the last add to it, so that no sum of chunks is rounded to the weight's
    dtype.

    Args:
        hidden: [N, h], the same on all ranks of the group; its gradient is this rank's share of a sum over them.
        weight: [local columns, h].
        chunk: > 0.
    """
    _check(temperature)
    return _Projected.apply(hidden, weight, targets, shard, chunk, temperature)


def _check(temperature: float) -> None:
    if temperature <= 0:
        raise ValueError(f"log-probabilities need rollout.sampling.temperature > 0, not {temperature}")


class _VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, shard: VocabShard, temperature: float):
        partial = _Partial(len(logits), logits.device)
        partial.add(slice(None), logits, targets, shard, temperature)
        log_prob, entropy = partial.finish(shard)
        ctx.save_for_backward(logits, targets, partial.maximum, partial.log_sum, entropy)
        ctx.shard, ctx.temperature = shard, temperature
        return log_prob, entropy

    @staticmethod
    def backward(ctx, grad_log_prob, grad_entropy):
        logits, *of_tokens = ctx.saved_tensors
        return _gradient(logits, grad_log_prob, grad_entropy, *of_tokens, ctx.shard, ctx.temperature), None, None, None


class _Projected(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, shard: VocabShard, chunk: int, temperature: float):
        partial = _Partial(len(hidden), hidden.device)
        for rows in _slices(len(hidden), chunk):
            partial.add(rows, hidden[rows] @ weight.T, targets[rows], shard, temperature)
        log_prob, entropy = partial.finish(shard)
        ctx.save_for_backward(hidden, weight, targets, partial.maximum, partial.log_sum, entropy)
        ctx.main_grad = getattr(weight, "main_grad", None)
        ctx.shard, ctx.chunk, ctx.temperature = shard, chunk, temperature
        return log_prob, entropy

    @staticmethod
    def backward(ctx, grad_log_prob, grad_entropy):
        hidden, weight, *of_tokens = ctx.saved_tensors
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        before = torch.zeros_like(weight) if ctx.main_grad is None else ctx.main_grad
        for rows in _slices(len(hidden), ctx.chunk):
            grad = _gradient(hidden[rows] @ weight.T, grad_log_prob[rows], grad_entropy[rows],
                             *(values[rows] for values in of_tokens), ctx.shard, ctx.temperature)
            torch.matmul(grad, weight, out=grad_hidden[rows])
            before += grad_weight
            grad_weight = grad.T @ hidden[rows]
        if ctx.main_grad is None:
            grad_weight += before
        return grad_hidden, grad_weight, None, None, None, None


class _Partial:
    """Of N tokens, what a rank knows from its own columns, then what all ranks know together. All are fp32 [N]."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        self.maximum = torch.full((tokens,), -torch.inf, dtype=torch.float32, device=device)
        # Rows: Σ exp(x - max), Σ exp(x - max) (x - max), and the target's x; the first two with the local maximum.
        self.sums = torch.zeros((3, tokens), dtype=torch.float32, device=device)
        self.log_sum = self.sums[0]

    def add(self, where: slice, logits: torch.Tensor, targets: torch.Tensor, shard: VocabShard,
            temperature: float) -> None:
        """Take in the logits of the tokens at `where`."""
        columns = shard.columns(logits)
        if columns == 0:
            return
        maximum, sums = self.maximum[where], self.sums[:, where]
        for rows in _chunks(logits):
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

    def finish(self, shard: VocabShard) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy, over all columns; collective over the group."""
        sums, local_maximum = self.sums, self.maximum.clone()
        shard.all_reduce(self.maximum, dist.ReduceOp.MAX)
        # A shard of padding alone has no maximum, and sums of 0.
        shift = torch.where(local_maximum == -torch.inf, 0.0, local_maximum - self.maximum)
        scale = shift.exp()
        sums[1] = scale * (sums[1] + shift * sums[0])
        sums[0] *= scale
        shard.all_reduce(sums)
        self.log_sum = sums[0].log()
        # In this order: the maximum may be so large that log_sum would vanish in their sum.
        return sums[2] - self.maximum - self.log_sum, self.log_sum - sums[1] / sums[0]


def _gradient(logits, grad_log_prob, grad_entropy, targets, maximum, log_sum, entropy, shard: VocabShard,
              temperature: float) -> torch.Tensor:
    """Gradient with respect to the logits, in their dtype."""
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
    return grad


def _chunks(logits: torch.Tensor) -> list[slice]:
    return _slices(len(logits), max(1, CHUNK_ELEMENTS // logits.shape[1]))


def _slices(rows: int, step: int) -> list[slice]:
    return [slice(start, start + step) for start in range(0, rows, step)]
