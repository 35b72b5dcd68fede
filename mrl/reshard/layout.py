"""Where a rank stands in the trainer's grid, and what that alone decides: its layers, experts and vocabulary rows.

Everything about parallel dimensions that needs no model belongs here. Rank order is Megatron's default
(tp-cp-ep-dp-pp): tensor-parallel neighbours are adjacent ranks, pipeline stages are furthest apart.

The ranks of one stage form two grids. Most weights are cut over tp and repeated over dp; experts are dealt out over ep,
each is cut over etp, and all are repeated over what is left, Megatron's expert data parallelism:

    rank within the stage = tp index + tp * dp index = etp index + etp * (ep index + ep * expert dp index)

`dp` counts copies of the weights. With context parallelism `cp` consecutive copies work on the same samples, each on
its share of the tokens: a batch is divided over dp / cp replicas.

With virtual pipeline stages (vpp > 1) a rank holds vpp chunks of the model. Layers pass through all stages with their
chunk 0 first, then through all with chunk 1, and so on: the embedding is in chunk 0 of the first stage, the final norm
and the output layer are in the last chunk of the last stage.
"""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Coord:
    """Position of one rank: its index in each parallel dimension. Of the weights it holds, `dp` decides only experts'.

    The position among experts follows from it: `Layout.expert_coord`.
    """

    tp: int = 0
    pp: int = 0
    dp: int = 0


@dataclass(frozen=True, slots=True)
class ExpertCoord:
    """Position of one rank among the experts of its stage: which experts, which slice of each, which repetition."""

    ep: int
    etp: int
    dp: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the trainer's parallel dimensions.

    `ep`, `etp`: parts into which the experts of a layer, and the weights of each, are divided. Unlike in Megatron,
    where it follows tp, etp is 1 unless given. ValueError where a stage's tp * dp ranks are no multiple of ep * etp.
    `vpp`: chunks of the model on every stage. `first_stage_layers`, `last_stage_layers`: layers of these stages; None:
    as many as each of the stages that share the rest.
    `vocab_multiple`: Megatron's `make_vocab_size_divisible_by`; the embedding is padded to a multiple of it times tp.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    vocab_multiple: int = 128
    vpp: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    cp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "ep", "etp", "vocab_multiple", "vpp", "first_stage_layers", "last_stage_layers",
                     "cp"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"layout: {name} is {value}, but must be at least 1")
        if self.tp * self.dp % (self.ep * self.etp):
            raise ValueError(f"layout: tp {self.tp} * dp {self.dp} = {self.tp * self.dp} ranks a stage are not a "
                             f"multiple of ep {self.ep} * etp {self.etp}")
        if self.dp % self.cp:
            raise ValueError(f"layout: cp {self.cp} does not divide dp {self.dp}, the copies of the weights")

    def __str__(self) -> str:
        """Its sizes in words; of most only those that were chosen."""
        usual = Layout(self.tp, self.pp, self.dp)
        chosen = [name for name in self.__slots__ if getattr(self, name) != getattr(usual, name)]
        return ", ".join(f"{name} {getattr(self, name)}" for name in ("tp", "pp", "dp", *chosen))

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp

    @property
    def replicas(self) -> int:
        """Groups of ranks that work on samples of their own: the parts of a batch."""
        return self.dp // self.cp

    def replica(self, coord: Coord) -> int:
        """Which of them the rank at `coord` belongs to."""
        return coord.dp // self.cp

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

    @property
    def experts(self) -> Layout:
        """The same ranks as the weights of one expert see them: cut over etp, everything else a repetition."""
        return Layout(tp=self.etp, pp=self.pp, dp=self.tp * self.dp // self.etp)

    def expert_coord(self, coord: Coord) -> ExpertCoord:
        """Position of the rank at `coord` among the experts of its stage."""
        at = self.experts.coord(self.rank(coord))
        repetition, ep = divmod(at.dp, self.ep)
        return ExpertCoord(ep=ep, etp=at.tp, dp=repetition)

    def is_first(self, coord: Coord) -> bool:
        """True on the stage that holds the embedding."""
        return coord.pp == 0

    def is_last(self, coord: Coord) -> bool:
        """True on the stage that holds the final norm and the output layer."""
        return coord.pp == self.pp - 1

    def has_embedding(self, coord: Coord, chunk: int) -> bool:
        """True for the chunk that begins the model."""
        return self.is_first(coord) and chunk == 0

    def has_output(self, coord: Coord, chunk: int) -> bool:
        """True for the chunk that ends the model, with the final norm and the output layer."""
        return self.is_last(coord) and chunk == self.vpp - 1

    def layers(self, num_layers: int, stage: int, chunk: int = 0) -> range:
        """Global indices of the layers in one chunk of a pipeline stage, of a model of `num_layers`.

        Megatron numbers a chunk's layers from 0: the one at local index i is `layers(...)[i]`. ValueError listing every
        reason why the model's layers do not divide over the chunks.
        """
        if problems := self.pipeline_problems(num_layers):
            raise ValueError("; ".join(problems))
        sizes = [size // self.vpp for size in self._stage_sizes(num_layers)]
        start = chunk * sum(sizes) + sum(sizes[:stage])
        return range(start, start + sizes[stage])

    def pipeline_problems(self, num_layers: int) -> list[str]:
        """Why `num_layers` do not divide over stages and chunks, one sentence each; empty when they do."""
        given = self._given_stages()
        if self.pp == 1:
            wanted = {**given, "vpp": self.vpp} if self.vpp > 1 else given
            return [f"{name} {size} needs pp of at least 2" for name, size in wanted.items()]
        if self.pp == len(given):
            return ["with pp 2, first_stage_layers and last_stage_layers say the same: give one of them"]
        rest, stages = num_layers - sum(given.values()), self.pp - len(given)
        if given and (rest < stages or rest % stages):
            words = " and ".join(f"{name} {size}" for name, size in given.items())
            return [f"{rest} layers, what {words} leave of num_hidden_layers {num_layers}, do not divide over the "
                    f"other {stages} of pp {self.pp} stages"]
        if rest % stages:
            return [f"pp {self.pp} does not divide num_hidden_layers {num_layers}"]
        uneven = sorted({size for size in self._stage_sizes(num_layers) if size % self.vpp})
        return [f"vpp {self.vpp} does not divide the {size} layers of a stage" for size in uneven]

    def _given_stages(self) -> dict[str, int]:
        """The stages whose number of layers was chosen."""
        sizes = {"first_stage_layers": self.first_stage_layers, "last_stage_layers": self.last_stage_layers}
        return {name: size for name, size in sizes.items() if size is not None}

    def _stage_sizes(self, num_layers: int) -> list[int]:
        """Layers of every stage; they are assumed to divide."""
        given = self._given_stages()
        share = (num_layers - sum(given.values())) // (self.pp - len(given))
        sizes = [share] * self.pp
        if self.first_stage_layers is not None:
            sizes[0] = self.first_stage_layers
        if self.last_stage_layers is not None:
            sizes[-1] = self.last_stage_layers
        return sizes

    def padded_vocab(self, vocab: int) -> int:
        """Rows of Megatron's embedding over all tp ranks: `vocab` rounded up to a multiple of vocab_multiple * tp."""
        unit = self.vocab_multiple * self.tp
        return -(-vocab // unit) * unit


def expert_range(num_experts: int, ep: int, ep_rank: int) -> range:
    """Global indices of the experts on rank `ep_rank` of `ep`: Megatron's contiguous blocks, numbered from 0 on each.

    ValueError when the experts do not divide evenly.
    """
    if num_experts % ep:
        raise ValueError(f"{num_experts} experts do not divide over ep {ep}")
    per_rank = num_experts // ep
    return range(ep_rank * per_rank, (ep_rank + 1) * per_rank)
