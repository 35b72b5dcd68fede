"""Which samples go into which microbatch of which data-parallel rank, and how a microbatch is packed into one row.

Pure functions on lengths and tensors: no Megatron, no distributed state.
"""
from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Sequence

import torch

Sample = dict[str, torch.Tensor]
"""Per-token fields of one sequence, each of shape [T] ("experts", int16: [T, layers with experts, experts a token]);
"tokens" (int64) is required. Index t belongs to token t."""


def assign(lengths: Sequence[int], dp: int, max_tokens: int) -> list[list[list[int]]]:
    """Distribute samples over data-parallel ranks and microbatches.

    Longest first to the rank with the fewest tokens; on each rank, longest first into the emptiest of the fewest
    microbatches that hold them. All ranks get the same number of microbatches, since pipeline and gradient collectives
    pair them up; spare ones are empty.

    Args:
        lengths: tokens of each sample.
        dp: data-parallel size.
        max_tokens: token budget of one microbatch.

    Returns:
        For each dp rank, its microbatches: lists of sample indices, ascending. Every index occurs exactly once. At
        least one microbatch a rank.

    Raises:
        ValueError: a sample is longer than the budget.
    """
    for index, length in enumerate(lengths):
        if length > max_tokens:
            raise ValueError(f"sample {index} has {length} tokens, more than batch.max_tokens_per_microbatch = "
                             f"{max_tokens}; raise that key or lower rollout.sampling.max_response_tokens")
    ranks: list[list[int]] = [[] for _ in range(dp)]
    load = [0] * dp
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = min(range(dp), key=lambda r: (load[r], len(ranks[r]), r))
        ranks[rank].append(index)
        load[rank] += lengths[index]
    count = max(1, max((_fewest(lengths, rank, max_tokens) for rank in ranks), default=1))
    while (filled := [_fill(lengths, rank, count, max_tokens) for rank in ranks]).count(None):
        count += 1
    return [[sorted(microbatch) for microbatch in rank] for rank in filled]


def _fewest(lengths: Sequence[int], samples: list[int], max_tokens: int) -> int:
    """Lower bound of the microbatches that `samples` need."""
    return -(-sum(lengths[i] for i in samples) // max_tokens)


def _fill(lengths: Sequence[int], samples: list[int], count: int, max_tokens: int) -> list[list[int]] | None:
    """`samples` (longest first) spread evenly over `count` microbatches; None if one would exceed the budget."""
    microbatches: list[list[int]] = [[] for _ in range(count)]
    load = [0] * count
    for index in samples:
        target = min(range(count), key=lambda m: (load[m], m))
        load[target] += lengths[index]
        if load[target] > max_tokens:
            return None
        microbatches[target].append(index)
    return microbatches


@dataclass(frozen=True)
class Packed:
    """One microbatch as a single row. N: real tokens; P >= N: with the padding behind sequences and at the tail."""

    tokens: torch.Tensor
    """int64 [P]; 0 in the padding."""
    position_ids: torch.Tensor
    """int64 [P]; restarts with every sequence."""
    cu_seqlens: torch.Tensor
    """int32 [sequences + 1]: start of every sequence, then P. Padding at the tail is the last sequence."""
    places: torch.Tensor
    """int64 [N]: where each real token is in the row."""
    fields: Sample
    """Every field of the samples, concatenated: [N, …]. And "sequence", int64: which of the samples a token is of."""
    lengths: list[int]
    """Tokens of each sample, without the padding."""
    longest: int
    """Tokens of the longest sequence, with the padding."""

    @property
    def real(self) -> int:
        """N."""
        return sum(self.lengths)

    def to(self, device: torch.device) -> "Packed":
        """A copy on `device`."""
        fields = {name: field.to(device) for name, field in self.fields.items()}
        return Packed(self.tokens.to(device), self.position_ids.to(device), self.cu_seqlens.to(device),
                      self.places.to(device), fields, self.lengths, self.longest)


def pack(samples: Sequence[Sample], multiple_of: int = 1, cp: int = 1) -> Packed:
    """Concatenate samples into one row (Megatron's "thd" format).

    Args:
        samples: may be empty; then the row is padding alone.
        multiple_of: the row's length is a multiple of it and at least it (tensor-parallel size under sequence
            parallelism).
        cp: context parallel size; above 1, every sequence is padded to a multiple of 2 * cp (see `context`), and each
            rank's share of the row has a length that is a multiple of `multiple_of`.

    Raises:
        ValueError: samples without "tokens", with fields of unequal length or with different sets of fields.
    """
    for index, sample in enumerate(samples):
        _check(sample, index, samples[0].keys())
    lengths = [len(sample["tokens"]) for sample in samples]
    multiple = 2 * cp if cp > 1 else 1
    spans = [length + -length % multiple for length in lengths]
    unit = lcm(multiple, cp * multiple_of)
    padding = -sum(spans) % unit if spans else unit
    starts = torch.tensor([0, *spans]).cumsum(0).tolist()
    spans += [padding] if padding else []
    names = samples[0].keys() if samples else ("tokens",)
    fields = {name: torch.cat([sample[name] for sample in samples]) if samples else torch.zeros(0, dtype=torch.int64)
              for name in names}
    places = torch.cat([torch.arange(start, start + length) for start, length in zip(starts, [*lengths, 0])])
    fields["sequence"] = torch.arange(len(samples)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    return Packed(
        tokens=torch.zeros(sum(spans), dtype=torch.int64).index_copy_(0, places, fields["tokens"]),
        position_ids=torch.cat([torch.arange(span) for span in spans]),
        cu_seqlens=torch.tensor([0, *torch.tensor(spans).cumsum(0)], dtype=torch.int32),
        places=places,
        fields=fields,
        lengths=lengths,
        longest=max(spans),
    )


def _check(sample: Sample, index: int, names) -> None:
    if "tokens" not in sample:
        raise ValueError(f"sample {index} has no field 'tokens', only {sorted(sample)}")
    if sample.keys() != names:
        raise ValueError(f"sample {index} has fields {sorted(sample)}, the first has {sorted(names)}")
    length = len(sample["tokens"])
    if wrong := {name: tuple(field.shape) for name, field in sample.items() if field.shape[:1] != (length,)}:
        raise ValueError(f"sample {index}: fields {wrong} differ from the shape of its tokens ({length},)")
