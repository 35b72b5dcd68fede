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
        ctx.save_for_backward(logits, targets, partial.maximum, partial.log_sum, partial.log_share, entropy)
        ctx.shard, ctx.temperature = shard, temperature
        ctx.set_materialize_grads(False)
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
        ctx.save_for_backward(hidden, weight, targets, partial.maximum, partial.log_sum, partial.log_share, entropy)
        ctx.main_grad = getattr(weight, "main_grad", None)
        ctx.shard, ctx.chunk, ctx.temperature = shard, chunk, temperature
        ctx.set_materialize_grads(False)
        return log_prob, entropy

    @staticmethod
    def backward(ctx, grad_log_prob, grad_entropy):
        hidden, weight, *of_tokens = ctx.saved_tensors
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        before = torch.zeros_like(weight) if ctx.main_grad is None else ctx.main_grad
        for rows in _slices(len(hidden), ctx.chunk):
            grads = (None if grad is None else grad[rows] for grad in (grad_log_prob, grad_entropy))
            grad = _gradient(hidden[rows] @ weight.T, *grads, *(values[rows] for values in of_tokens), ctx.shard,
                             ctx.temperature)
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
        # First the logarithm of exp(x - max) / softmax(x) with the local maximum; then that of p / softmax(x).
        self.log_share = torch.zeros_like(self.maximum)

    def add(self, where: slice, logits: torch.Tensor, targets: torch.Tensor, shard: VocabShard,
            temperature: float) -> None:
        """Take in the logits of the tokens at `where`. Logits are many: what matters is how often each is read."""
        columns = shard.columns(logits)
        if columns == 0:
            return
        maximum, sums, log_share = self.maximum[where], self.sums[:, where], self.log_share[where]
        for rows in _chunks(logits):
            x = _scaled(logits[rows, :columns], temperature)
            here, local = _local(targets[rows], shard, columns)
            sums[2, rows] = torch.where(here, x.gather(1, local)[:, 0].float(), 0.0)
            p = x.softmax(-1, dtype=torch.float32)
            highest, place = p.max(-1, keepdim=True)
            maximum[rows] = x.gather(1, place)[:, 0].float()
            # The kernel's own sum over a long row may be off in the sixth digit; torch's sum of what it makes is not.
            total, log_scale = p.sum(-1), -highest[:, 0].log()
            log_share[rows], sums[0, rows] = log_scale, total / highest[:, 0]
            sums[1, rows] = (total * log_scale - torch.special.entr(p, out=p).sum(-1)) / highest[:, 0]

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
        self.log_share += shift - self.log_sum
        # In this order: the maximum may be so large that log_sum would vanish in their sum.
        return sums[2] - self.maximum - self.log_sum, self.log_sum - sums[1] / sums[0]


def _gradient(logits, grad_log_prob, grad_entropy, targets, maximum, log_sum, log_share, entropy, shard: VocabShard,
              temperature: float) -> torch.Tensor:
    """Gradient with respect to the logits, in their dtype. A gradient that is None counts as zeros.

    With p = softmax: d log p(t) / dx_j = [j = t] - p_j and d entropy / dx_j = -p_j (log p_j + entropy).
    """
    columns = shard.columns(logits)
    if grad_log_prob is None:
        grad_log_prob = torch.zeros_like(entropy)
    grad = torch.empty_like(logits)
    grad[:, columns:] = 0
    for rows in _chunks(logits) if columns else ():
        x, out, wanted = _scaled(logits[rows, :columns], temperature), grad[rows, :columns], grad_log_prob[rows, None]
        if grad_entropy is None:
            p, factor = x.softmax(-1, dtype=torch.float32), wanted * log_share[rows, None].exp()
        else:
            log_p = x.to(torch.float32, copy=True).sub_(maximum[rows, None]).sub_(log_sum[rows, None])
            p = log_p.exp()
            factor = log_p.add_(entropy[rows, None]).mul_(grad_entropy[rows, None]).add_(wanted)
        here, local = _local(targets[rows], shard, columns)
        of_target = (wanted - factor.expand_as(p).gather(1, local) * p.gather(1, local)) / temperature
        torch.mul(p, factor.mul_(-1 / temperature), out=out)
        out.scatter_(1, local, torch.where(here[:, None], of_target.to(out.dtype), out.gather(1, local)))
    return grad


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """logits / temperature, in fp32 unless they are what they were."""
    return logits if temperature == 1 else logits.to(torch.float32, copy=True).div_(temperature)


def _local(targets: torch.Tensor, shard: VocabShard, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which targets are among this rank's columns [N], and in which one [N, 1]: any, if they are not."""
    local = targets - shard.start
    return (local >= 0) & (local < columns), local.clamp(0, columns - 1)[:, None]


def _chunks(logits: torch.Tensor) -> list[slice]:
    return _slices(len(logits), max(1, CHUNK_ELEMENTS // logits.shape[1]))


def _slices(rows: int, step: int) -> list[slice]:
    return [slice(start, start + step) for start in range(0, rows, step)]
