"""Where a rank stands in the trainer's grid, and what that alone decides: its layers and its vocabulary rows.

Everything about parallel dimensions that needs no model belongs here. Rank order is Megatron's default
(tp-cp-ep-dp-pp): tensor-parallel neighbours are adjacent ranks, pipeline stages are furthest apart.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator


@dataclass(frozen=True, slots=True)
class Coord:
    """Position of one rank: its index in each parallel dimension. `dp` never changes which weights a rank holds."""

    tp: int = 0
    pp: int = 0
    dp: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the trainer's parallel dimensions.

    `vocab_multiple`: Megatron's `make_vocab_size_divisible_by`; the embedding is padded to a multiple of it times tp.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    vocab_multiple: int = 128

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "vocab_multiple"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"layout: {name} is {value}, but must be at least 1")

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp

    def coord(self, rank: int) -> Coord:
        """Position of global rank `rank`. ValueError outside 0 … world-1."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is not in 0…{self.world - 1} of {self}")
        replica, tp = divmod(rank, self.tp)
        pp, dp = divmod(replica, self.dp)
        return Coord(tp=tp, pp=pp, dp=dp)

    def rank(self, coord: Coord) -> int:
        """Global rank at `coord`: the inverse of `coord()`."""
        return (coord.pp * self.dp + coord.dp) * self.tp + coord.tp

    def sender(self, stage: int) -> int:
        """Global rank that sends the weights of pipeline stage `stage`: its first tp and dp rank."""
        return self.rank(Coord(tp=0, pp=stage, dp=0))

    def shards(self) -> Iterator[Coord]:
        """Positions of one model replica, stage by stage: every distinct weight shard exactly once."""
        return (Coord(tp=tp, pp=pp) for pp in range(self.pp) for tp in range(self.tp))

    def is_first(self, coord: Coord) -> bool:
        """True on the stage that holds the embedding."""
        return coord.pp == 0

    def is_last(self, coord: Coord) -> bool:
        """True on the stage that holds the final norm and the output layer."""
        return coord.pp == self.pp - 1

    def padded_vocab(self, vocab: int) -> int:
        """Rows of Megatron's embedding over all tp ranks: `vocab` rounded up to a multiple of vocab_multiple * tp."""
        unit = self.vocab_multiple * self.tp
        return -(-vocab // unit) * unit


def layer_range(num_layers: int, pp: int, pp_rank: int) -> range:
    """Global indices of the layers on stage `pp_rank` of `pp`: Megatron's even, contiguous split.

    Megatron numbers a stage's layers from 0: the layer at local index i is `layer_range(...)[i]`.
    ValueError when the layers do not divide evenly.
    """
    if num_layers % pp:
        raise ValueError(f"{num_layers} layers do not divide over pp {pp} stages")
    per_stage = num_layers // pp
    return range(pp_rank * per_stage, (pp_rank + 1) * per_stage)
