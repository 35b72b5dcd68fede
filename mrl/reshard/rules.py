"""The vocabulary of a family table: a rule per Megatron parameter, a family per architecture. Data only."""
from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from mrl.reshard.pieces import HfTensor, Kind

if TYPE_CHECKING:
    from mrl.reshard.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Rule:
    """One Megatron parameter and the Hugging Face tensors it is made of; `{layer}` stands for a layer's index.

    `hf` pairs a tensor name with its dimensions, written as names of `ModelSpec` sizes or numbers: "moe.ffn hidden".
    `te_name` is the name under Transformer Engine's layer spec, which fuses a norm into the linear behind it.
    Names with `{expert}` make it a rule for every expert of a layer, cut over etp where others are cut over tp.
    """

    name: str
    te_name: str
    kind: Kind
    hf: tuple[tuple[str, str], ...]

    @property
    def expert(self) -> bool:
        """Whether it applies to every expert of a layer."""
        return "{expert}" in self.name

    def megatron(self, local_layer: int, local_expert: int, te: bool) -> str:
        """Megatron's name on a rank, where layers and experts are numbered from 0."""
        return (self.te_name if te else self.name).format(layer=local_layer, expert=local_expert)

    def tensors(self, spec: ModelSpec, layer: int, expert: int) -> tuple[HfTensor, ...]:
        """The HF tensors with their global shapes; `layer` and `expert` count over the whole model."""
        return tuple(
            HfTensor(name.format(layer=layer, expert=expert), tuple(_size(spec, size) for size in sizes.split()))
            for name, sizes in self.hf
        )


def _size(spec: ModelSpec, name: str) -> int:
    return int(name) if name.isdigit() else attrgetter(name)(spec)


def rule(name: str, kind: Kind, *hf: tuple[str, str], te: str | None = None) -> Rule:
    """A `Rule` as it is written in the tables; `te` where Transformer Engine's name differs."""
    return Rule(name, te or name, kind, hf)


@dataclass(frozen=True, slots=True)
class MoeKeys:
    """Which keys of config.json hold the sizes of `MoeSpec`; of `num_experts` the first that is there."""

    num_experts: tuple[str, ...]
    ffn: str
    shared_ffn: str | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """Everything that sets one model family apart: one file, mostly data, under `families/`.

    `requires`: config keys of which only this one value is implemented (a key that is absent, null or an empty
    list means that value).
    `defaults`: config keys that files of this family may leave out, with the value transformers then uses.
    `moe`: for a mixture of experts, where its sizes are found; every layer has experts then.
    `untrainable`: why the trainer cannot build it; loading, export and plans work all the same.
    """

    model_type: str
    architecture: str
    embedding: Rule
    layer: tuple[Rule, ...]
    final_norm: Rule
    output: Rule
    requires: tuple[tuple[str, object], ...] = ()
    defaults: tuple[tuple[str, object], ...] = ()
    qkv_bias: bool = False
    qk_norm: bool = False
    moe: MoeKeys | None = None
    untrainable: str | None = None

    @property
    def trainable(self) -> bool:
        """Whether the trainer can build it."""
        return self.untrainable is None
