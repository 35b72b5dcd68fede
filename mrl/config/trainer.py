"""The section `trainer`: how the gang divides the model, steps it, and saves memory and time."""
from __future__ import annotations

from typing import Literal, Optional

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from mrl.config.optimizer import Optimizer
from mrl.config.section import Section
from mrl.reshard.layout import Layout

RecomputedModule = Literal["core_attn", "mla_up_proj", "mlp", "moe", "shared_experts"]


class TrainerParallel(Section):
    tp: PositiveInt = Field(1, description="tensor parallel size")
    pp: PositiveInt = Field(1, description="pipeline parallel size")
    vpp: PositiveInt = Field(1, description="chunks of the model on each pipeline stage (interleaved schedule)")
    first_stage_layers: Optional[PositiveInt] = Field(
        None, description="layers of the first pipeline stage; null: as many as stages without a number of their own")
    last_stage_layers: Optional[PositiveInt] = Field(None, description="layers of the last pipeline stage, likewise")
    cp: PositiveInt = Field(1, description="context parallel size: ranks that share the tokens of every sample")
    ep: PositiveInt = Field(1, description="expert parallel size: parts into which a layer's experts are dealt out")
    etp: PositiveInt = Field(1, description="tensor parallel size of each expert")
    sequence_parallel: bool = Field(
        False, description="Megatron sequence parallelism in the tensor-parallel group; experts with tp > 1 need it")

    def layout(self, ranks: int) -> Layout:
        """The layout of so many trainer ranks. ValueError where they are no multiple of what these sizes need."""
        if ranks % (self.tp * self.cp * self.pp):
            raise ValueError(f"{ranks} trainer ranks cannot be split into replicas of trainer.parallel.tp {self.tp} * "
                             f"cp {self.cp} * pp {self.pp} = {self.tp * self.cp * self.pp} ranks")
        return Layout(tp=self.tp, cp=self.cp, pp=self.pp, dp=ranks // (self.tp * self.pp), ep=self.ep, etp=self.etp,
                      vpp=self.vpp,
                      first_stage_layers=self.first_stage_layers, last_stage_layers=self.last_stage_layers)


class Moe(Section):
    aux_loss_coef: NonNegativeFloat = Field(
        0.0, description="weight of the experts' load-balancing loss, summed over layers (Fedus et al. 2021); 0: none")


class Trainer(Section):
    parallel: TrainerParallel = TrainerParallel()
    moe: Moe = Moe()
    moe_routing: Literal["own", "replay"] = Field(
        "own", description="experts of the policy's tokens: those its router chooses, or those that the engine chose "
                           "when it sampled")
    optimizer: Optimizer = Optimizer()
    overlap_grad_reduce: bool = Field(
        False, description="sum the gradients of finished layers over replicas while the backward pass goes on")
    overlap_param_gather: bool = Field(
        False, description="fetch what other replicas have stepped while the next forward pass goes on, as layers need "
                           "it; takes overlap_grad_reduce")
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="compute activations again in the backward pass instead of keeping them: those of "
                            "recompute_modules, or of whole layers")
    recompute_modules: list[RecomputedModule] = Field(
        ["mlp", "moe"], min_length=1, description="with recompute selective: the parts of every layer that has them")
    recompute_layers: Optional[PositiveInt] = Field(
        None, description="with recompute full: the first N layers of every chunk of the model; null: all")
    logits_chunk: Optional[PositiveInt] = Field(
        None, description="tokens whose logits are in memory at once, computed again in the backward pass; null: those "
                          "of a whole microbatch")
    max_restarts: NonNegativeInt = Field(3, description="restarts of the whole gang from the last checkpoint")
    env: dict[str, str] = Field({}, description="extra environment of the trainer ranks")
