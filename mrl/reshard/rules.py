"""The vocabulary of a family table: a rule per Megatron parameter, a family per architecture. Data only."""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mrl.reshard.pieces import HfTensor, Kind

if TYPE_CHECKING:
    from mrl.reshard.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Rule:
    """One Megatron parameter and the Hugging Face tensors it is made of; `{layer}` stands for a layer's index.

    `hf` pairs a tensor name with its dimensions, written as names of `ModelSpec` sizes: "q_size hidden".
    `te_name` is the name under Transformer Engine's layer spec, which fuses a norm into the linear behind it.
    """

    name: str
    te_name: str
    kind: Kind
    hf: tuple[tuple[str, str], ...]

    def megatron(self, local_layer: int, te: bool) -> str:
        """Megatron's name on a stage, where layers are numbered from 0."""
        return (self.te_name if te else self.name).format(layer=local_layer)

    def tensors(self, spec: ModelSpec, layer: int) -> tuple[HfTensor, ...]:
        """The HF tensors with their global shapes; `layer` counts over the whole model."""
        return tuple(
            HfTensor(name.format(layer=layer), tuple(getattr(spec, size) for size in sizes.split()))
            for name, sizes in self.hf
        )


def rule(name: str, kind: Kind, *hf: tuple[str, str], te: str | None = None) -> Rule:
    """A `Rule` as it is written in the tables; `te` where Transformer Engine's name differs."""
    return Rule(name, te or name, kind, hf)


@dataclass(frozen=True, slots=True)
class Family:
    """Everything that sets one model family apart: one file, mostly data, under `families/`.

    `requires`: config keys of which only this one value is implemented (a key that is absent means that value).
    `defaults`: config keys that files of this family may leave out, with the value transformers then uses.
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
