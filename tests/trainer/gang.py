"""What the scripts that run under torchrun share: start-up, a tiny experiment, whole gradients."""
from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

import torch
import torch.distributed as dist

from mrl.config.schema import Experiment
from mrl.platform import Platform, get_platform
from tests.trainer.tiny import TEMPERATURE


@contextmanager
def gang() -> Iterator[Platform]:
    """The platform, with Megatron installed and the process group initialised."""
    platform = get_platform("cpu")
    platform.set_device(int(os.environ["LOCAL_RANK"]))
    platform.install()
    torch.set_num_threads(1)
    dist.init_process_group(platform.backend)
    try:
        yield platform
    finally:
        dist.destroy_process_group()


def experiment(model: Path, parallel: dict | None = None, algorithm: dict | None = None, batch: dict | None = None,
               dtype: str = "float32", aux_loss_coef: float = 0.0, mtp: str = "drop", **optimizer) -> Experiment:
    """An experiment of which the trainer sees only what is given here."""
    return Experiment.model_validate({
        "model": {"path": str(model), "dtype": dtype, "mtp": mtp},
        "data": {"train": "none.jsonl"},
        "algorithm": algorithm or {},
        "batch": {"prompts_per_step": 1, "samples_per_prompt": 1, **(batch or {})},
        "trainer": {"parallel": parallel or {}, "moe": {"aux_loss_coef": aux_loss_coef},
                    "optimizer": {"clip_grad": 0.0, **optimizer}},
        "rollout": {"python": "python", "sampling": {"temperature": TEMPERATURE}},
        "loop": {"steps": 1},
        "cluster": {"device": "cpu"},
    })


def parse_parallel(words: str) -> dict:
    """The section trainer.parallel from "tp=2,pp=2,sp=1": `sp` is sequence_parallel, 0 or 1."""
    section = {name: int(value) for name, _, value in (word.partition("=") for word in words.split(","))}
    return {**section, "sequence_parallel": True} if section.pop("sp", 0) else section


def whole_gradients(model) -> dict[str, torch.Tensor]:
    """On rank 0, gradients of a TrainedModel by Hugging Face name, on the host, assembled from all ranks through the
    reshard rules; of a critic also "value_head", and zeros for the output layer that it does not have. Nothing on other
    ranks. Collective."""
    from mrl.reshard import chunk_prefix, is_output, local_params
    from mrl.reshard.export import export_tensors

    local, head = {plan.name: torch.zeros(plan.shape)
                   for plan in local_params(model.spec, model.layout, model.coord, model.te)}, None
    for index, chunk in enumerate(model.chunks):
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:  # after the reduce-scatter every rank holds only its shard of the sum
                shards = list(bucket.grad_data.view(group.size(), -1))
                dist.all_gather(shards, shards[group.rank()].clone(), group=group)
        for name, param in chunk.module.named_parameters():
            if model.value_head and is_output(name):
                head = param.main_grad.cpu()
            else:
                local[chunk_prefix(model.layout, index) + name] = param.main_grad.cpu()
    everyone = None if dist.get_rank() else [None] * dist.get_world_size()
    dist.gather_object((local, head), everyone)
    if everyone is None:
        return {}
    layout = model.layout
    whole = dict(export_tensors(model.spec, layout, lambda coord, name: everyone[layout.rank(coord)][0][name],
                                model.te))
    return {**whole, "value_head": everyone[-1][1]} if model.value_head else whole
