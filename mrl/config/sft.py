"""The file of a supervised fine-tuning, as types. docs/sft.md explains its keys, `mrl.config.sft_checks` checks."""
from __future__ import annotations

from typing import Literal, Optional

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from mrl.config.schema import Checkpoint, Data, Model, PlainLog
from mrl.config.section import Section
from mrl.config.trainer import Trainer


class SftData(Data):
    eval: Optional[str] = Field(None, description="held-out prompts and answers, same formats; null: none")


class SftBatch(Section):
    samples_per_step: PositiveInt = Field(description="samples of one optimizer step")
    max_tokens_per_microbatch: PositiveInt = Field(
        16384, description="tokens one forward/backward holds on one data-parallel replica: as many samples are packed "
                           "into its row as fit")


class SftEval(Section):
    every: NonNegativeInt = Field(
        0, description="loss on data.eval before step 1, every N steps and after the last; 0: never")


class SftCluster(Section):
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda when a GPU is visible")
    trainer_gpus: PositiveInt = Field(1, description="trainer ranks, one a GPU; on cpu they are processes")


class SftExperiment(Section):
    """One supervised fine-tuning: everything `mrl sft` needs to know."""

    name: str = Field("sft", pattern=r"^[A-Za-z0-9._-]+$", description="run directories are named after it")
    seed: NonNegativeInt = Field(1, description="of the samples' order and initialisation")
    out: str = Field(description="new directory for the result, a Hugging Face checkpoint")
    steps: PositiveInt = Field(description="optimizer steps, at most")
    stop_below: NonNegativeFloat = Field(
        0.0, description="stop when the loss, averaged over 20 steps, is below; 0: never")
    model: Model
    data: SftData
    batch: SftBatch
    trainer: Trainer = Trainer()
    eval: SftEval = SftEval()
    cluster: SftCluster = SftCluster()
    checkpoint: Checkpoint = Checkpoint(every=0)
    log: PlainLog = PlainLog()
