"""The section `optimizer` of a model that is trained: the policy's, or the critic's."""
from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from mrl.config.section import Fraction, Section


class Optimizer(Section):
    lr: PositiveFloat = Field(1e-6, description="peak learning rate of Adam")
    min_lr: NonNegativeFloat = Field(0.0, description="learning rate that the schedule ends at")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="decay after the warm-up")
    warmup_steps: NonNegativeInt = Field(0, description="optimizer steps of linear warm-up from 0 to lr")
    weight_decay: NonNegativeFloat = Field(0.01, description="decoupled weight decay")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.95), strict=False, description="Adam's two decay rates")
    eps: PositiveFloat = Field(1e-8, description="Adam's epsilon")
    clip_grad: NonNegativeFloat = Field(1.0, description="global gradient norm; 0: no clipping")
    grad_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="dtype in which gradients of a bfloat16 model are summed over microbatches and replicas")
    cpu_offload: bool = Field(
        False, description="on GPUs: keep Adam's moments and the float32 weights that it steps in host memory, and "
                           "step them there")
