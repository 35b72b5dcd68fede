"""The vocabulary of a family table: a rule per Megatron parameter, a family per architecture. Data only."""
from __future__ import annotations

from dataclasses import dataclass
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING

from mrl.reshard.pieces import HfTensor, Kind

if TYPE_CHECKING:
    from mrl.reshard.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Rule:
    """One Megatron parameter and the Hugging Face tensors it is made of; `{layer}` stands for a layer's index.

    `hf` pairs a tensor name with its dimensions, written as products of `ModelSpec` sizes and numbers: "2*ffn hidden".
    `te_name` is the name under Transformer Engine's layer spec, which fuses a norm into the linear behind it; `te_kind`
    is how it is cut there. Names with `{expert}` make it a rule for every expert of a layer, cut over etp where others
    are cut over tp. Names of HF tensors that stack the experts have none.
    `when`: attribute of the `ModelSpec` that must be true for the model to have it; None: every model has.
    `dtype`: for one of Megatron's buffers, whose dtype does not follow the model's.
    """

    name: str
    te_name: str
    kind: Kind
    te_kind: Kind
    hf: tuple[tuple[str, str], ...]
    when: str | None = None
    dtype: str | None = None

    @property
    def expert(self) -> bool:
        """Whether it applies to every expert of a layer."""
        return "{expert}" in self.name

    @property
    def projection(self) -> bool:
        """Whether it is the matrix of a projection in attention, an MLP or an expert, whose HF tensors may be fp8."""
        return ".linear_" in self.name and self.name.endswith(".weight") and self.name.startswith("decoder.layers.")

    def applies(self, spec: ModelSpec) -> bool:
        """Whether the model has it."""
        return self.when is None or bool(attrgetter(self.when)(spec))

    def megatron(self, local_layer: int, local_expert: int, te: bool) -> str:
        """Megatron's name on a rank, where layers and experts are numbered from 0."""
        return (self.te_name if te else self.name).format(layer=local_layer, expert=local_expert)

    def tensors(self, spec: ModelSpec, layer: int, expert: int) -> tuple[HfTensor, ...]:
        """The HF tensors with their global shapes; `layer` and `expert` count over the whole model."""
        return tuple(
            HfTensor(name.format(layer=layer, expert=expert),
                     tuple(_size(spec, size) for size in sizes.split()), expert)
            for name, sizes in self.hf
        )


def _size(spec: ModelSpec, product: str) -> int:
    return prod(int(name) if name.isdigit() else attrgetter(name)(spec) for name in product.split("*"))


def rule(
    name: str, kind: Kind, *hf: tuple[str, str], te: str | None = None, te_kind: Kind | None = None,
    when: str | None = None, dtype: str | None = None,
) -> Rule:
    """A `Rule` as it is written in the tables; `te` and `te_kind` where Transformer Engine's differ."""
    return Rule(name, te or name, kind, te_kind or kind, hf, when, dtype)


@dataclass(frozen=True, slots=True)
class MoeKeys:
    """Where the experts of a family are found in its config.json, and how it routes tokens to them.

    `num_experts`, `ffn`, `shared_ffn`: keys of the sizes of `MoeSpec`; of `num_experts` the first that is there.
    `shared_count`: instead of `shared_ffn`, the key of how many experts' width the shared one has.
    `dense_layers`: key of the number of leading layers without experts; None: there are none.
    `groups`, `group_best`: keys (groups, groups chosen per token) of routing limited to groups of experts, and how many
    of its best experts make a group's score. `group_method`: key and value that this routing depends on, if it does.
    `scoring`, `bias`, `shared_gate`: see `MoeSpec`.
    """

    num_experts: tuple[str, ...]
    ffn: str
    shared_ffn: str | None = None
    shared_count: str | None = None
    dense_layers: str | None = None
    scoring: str = "softmax"
    bias: bool = False
    shared_gate: bool = False
    groups: tuple[str, str] | None = None
    group_best: int = 1
    group_method: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """Everything that sets one model family apart: one file, mostly data, under `families/`.

    `layer`: the rules of a layer; `dense_layer`: of the leading layers that have no experts, where `moe` counts some.
    `mtp`: the rules of a multi-token-prediction layer, whose index in HF names goes on behind the last layer's.
    `requires`: config keys of which only this one value is implemented (a key that is absent, null or an empty
    list means that value). Of a key that is not in them, `spec.COMMON_REQUIREMENTS` may ask something.
    `defaults`: config keys that files of this family may leave out, with the value transformers then uses.
    `qkv_bias`, `qk_norm`: whether it has them, or the config key that says so.
    `layer_types`: the values of that config key that are implemented.
    `partial_rotary`: whether the rotary embedding may turn only the first part of every head.
    `mla`: latent attention. `moe`: for a mixture of experts, where its sizes are found.
    `untrainable`: why the trainer cannot build it; loading, export and plans work all the same.
    """

    model_type: str
    architecture: str
    embedding: Rule
    layer: tuple[Rule, ...]
    final_norm: Rule
    output: Rule
    dense_layer: tuple[Rule, ...] = ()
    mtp: tuple[Rule, ...] = ()
    requires: tuple[tuple[str, object], ...] = ()
    defaults: tuple[tuple[str, object], ...] = ()
    qkv_bias: bool | str = False
    qk_norm: bool | str = False
    layer_types: tuple[str, ...] = ("full_attention",)
    partial_rotary: bool = False
    mla: bool = False
    moe: MoeKeys | None = None
    untrainable: str | None = None

    @property
    def trainable(self) -> bool:
        """Whether the trainer can build it."""
        return self.untrainable is None
