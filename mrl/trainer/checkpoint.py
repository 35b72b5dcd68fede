"""Checkpoints of a training run: everything that a resumed gang of the same layout needs, and nothing of the loop.

A directory holds
    meta.json                               layout, optimizer steps, versions
    weights_tp{t}_pp{p}.safetensors         Megatron names, written by data-parallel rank 0
    experts_ep{e}_etp{t}_pp{p}.safetensors  the experts of a mixture, written by the first rank that holds them
    optimizer_rank{r}.pt                    this rank's shard of moments and fp32 masters
    random_rank{r}.pt                       this rank's random state
    critic/                                 the first four again, where a critic is trained
    reference/                              the two kinds of weights again, where the reference has moved
It appears whole or not at all; `tidy_checkpoints` removes what a killed save leaves. All ranks must see the same file
system.
"""
from __future__ import annotations

import dataclasses
import json
import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping

import megatron.core
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from safetensors.torch import load_file, save_file

from mrl.reshard import is_expert
from mrl.trainer import megatron_compat
from mrl.trainer.export import export_checkpoint
from mrl.trainer.files import (
    CRITIC, META, PARTIAL, REFERENCE, REPLACED, experts_file, optimizer_file, random_file, read_meta, weights_file,
)

if TYPE_CHECKING:
    from mrl.trainer.trained_model import TrainedModel
    from mrl.trainer.trainer import Trainer


def save(trainer: Trainer, directory: Path, extra: Mapping[str, bytes]) -> None:
    """Write a checkpoint; one of the same name is replaced only when the new one is complete. Collective."""
    partial = directory.with_name(directory.name + PARTIAL)
    for model, part in _parts(trainer, partial):
        with model.awake():
            _write_weights(model, part)
            torch.save([_optimizer_state(optimizer) for optimizer in model.optimizer.inner],
                       part / optimizer_file(dist.get_rank()))
    if reference := trainer.moved_reference():
        _write_shards(trainer, reference, partial / REFERENCE)
    torch.save(_rng_state(trainer), partial / random_file(dist.get_rank()))
    for name, content in extra.items():
        (partial / name).write_bytes(content)
    dist.barrier()
    if dist.get_rank() == 0:
        _replace(partial, directory)
    dist.barrier()


def export(trainer: Trainer, out: Path) -> None:
    """Write the weights as a Hugging Face model directory, by way of the shards' files beside it. Collective."""
    shards = out.with_name(out.name + ".shards")
    _write_weights(trainer, shards)
    if dist.get_rank() == 0:
        try:
            export_checkpoint(shards, trainer.spec, trainer.source, out)
        finally:
            shutil.rmtree(shards)
    dist.barrier()


def load(trainer: Trainer, directory: Path) -> None:
    """Restore a checkpoint into a trainer of the same model, layout and dtype. Collective.

    Raises:
        FileNotFoundError: not a checkpoint, or one without the critic that this run has.
        ValueError: written under another layout, or with other parameters.
    """
    for model, part in _parts(trainer, directory):
        with model.awake():
            _load_model(model, part)
    if reference := trainer.moved_reference():
        _read_shards(trainer, reference, directory / REFERENCE)
    _set_rng_state(trainer, torch.load(directory / random_file(dist.get_rank()), map_location="cpu", weights_only=True))


def _parts(trainer: Trainer, directory: Path) -> list[tuple[TrainedModel, Path]]:
    """The models of a trainer, and where in a checkpoint each is."""
    critic = [(trainer.critic, directory / CRITIC)] if trainer.critic else []
    return [(trainer, directory), *critic]


def _load_model(model: TrainedModel, directory: Path) -> None:
    layout, meta = read_meta(directory)
    if layout != model.layout:
        raise ValueError(f"{directory} was written with {layout}, this run has {model.layout}; "
                         "resume with the same trainer.parallel and number of trainer ranks, or start from an export")
    _read_shards(model, model.local_params(), directory)
    states = torch.load(directory / optimizer_file(dist.get_rank()), map_location="cpu", weights_only=True)
    for optimizer, saved in zip(model.optimizer.inner, states, strict=True):
        _load_optimizer(optimizer, saved)
    model.optimizer.resume_schedule(meta["optimizer_steps"])


def _write_weights(model: TrainedModel, directory: Path) -> None:
    """A new directory with the weights and meta.json; complete when it returns. Collective."""
    if dist.get_rank() == 0:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        (directory / META).write_text(json.dumps(_meta(model), indent=2) + "\n", encoding="utf-8")
    dist.barrier()
    model.gather_params()
    _write_shards(model, model.local_params(), directory)


def _write_shards(model: TrainedModel, params: Mapping[str, torch.Tensor], directory: Path) -> None:
    """What this rank is to write of tensors that are laid out as the model's parameters. Collective."""
    directory.mkdir(exist_ok=True)
    if model.coord.dp == 0:
        _save({name: param for name, param in params.items() if not is_expert(name)},
              directory / weights_file(model.coord))
    if model.spec.moe and model.layout.expert_coord(model.coord).dp == 0:
        _save({name: param for name, param in params.items() if is_expert(name)},
              directory / experts_file(model.layout, model.coord))
    dist.barrier()


@torch.no_grad()
def _read_shards(model: TrainedModel, params: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Fill `params` with what `_write_shards` wrote of them."""
    weights = load_file(directory / weights_file(model.coord))
    if model.spec.moe:
        weights |= load_file(directory / experts_file(model.layout, model.coord))
    _check(model, params, weights, directory)
    for name, param in params.items():
        param.copy_(weights[name])


def _save(params: Mapping[str, torch.Tensor], file: Path) -> None:
    # Copies: a live parameter is a view of Megatron's flat buffer, which would be written whole.
    save_file({name: param.to("cpu", copy=True) for name, param in params.items()}, file)


def _meta(model: TrainedModel) -> dict[str, Any]:
    return {
        "layout": dataclasses.asdict(model.layout),
        "optimizer_steps": model.optimizer.steps,
        "transformer_engine": model.te,
        "versions": {"torch": torch.__version__, "megatron-core": megatron.core.__version__},
    }


def _replace(partial: Path, directory: Path) -> None:
    old = directory.with_name(directory.name + REPLACED)
    if directory.exists():
        shutil.rmtree(old, ignore_errors=True)
        directory.rename(old)
    partial.rename(directory)
    shutil.rmtree(old, ignore_errors=True)


def _optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Moments and masters of this rank's shard. What the experiment file decides (lr, betas, …) is not in it."""
    return {
        "state": {index: {name: value for name, value in values.items() if name != "master_param"}
                  for index, values in optimizer.state_dict()["state"].items()},
        # Transformer Engine's Adam counts its steps per group, torch's per parameter (inside "state").
        "group_steps": [group.get("step") for group in optimizer.param_groups],
        "masters": [master.detach().to("cpu", copy=True) for master in megatron_compat.masters(optimizer)],
    }


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    # Copies: on the host the optimizer would keep the file's own tensors, whose memory cannot be given up when idle.
    state = {index: {name: value.clone() if torch.is_tensor(value) else value for name, value in values.items()}
             for index, values in saved["state"].items()}
    merged = optimizer.state_dict() | {"state": state}
    for group, step in zip(merged["param_groups"], saved["group_steps"], strict=True):
        if step is not None:
            group["step"] = step
    optimizer.load_state_dict(merged)
    with torch.no_grad():
        for master, kept in zip(megatron_compat.masters(optimizer), saved["masters"], strict=True):
            master.copy_(kept)


def _rng_state(trainer: Trainer) -> dict[str, Any]:
    return {"python": random.getstate(), "cpu": torch.get_rng_state(), "device": trainer.platform.rng_state(),
            "tensor_parallel": get_cuda_rng_tracker().get_states()}


def _set_rng_state(trainer: Trainer, state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["cpu"])
    trainer.platform.set_rng_state(state["device"])
    get_cuda_rng_tracker().set_states(state["tensor_parallel"])


def _check(model: TrainedModel, params: Mapping[str, torch.Tensor], weights: dict[str, torch.Tensor],
           directory: Path) -> None:
    """Same names, shapes and dtypes."""
    expected, found = ({name: f"{tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items()}
                       for tensors in (params, weights))
    wrong = [f"{name}: {found.get(name, 'nothing')} in the file, {expected.get(name, 'nothing')} in the model"
             for name in sorted(expected.keys() | found.keys()) if expected.get(name) != found.get(name)]
    if wrong:
        raise ValueError(f"{directory} holds other parameters than this run's model ({len(wrong)} differ; check "
                         f"{model.path_key} and model.dtype):\n  " + "\n  ".join(wrong[:10]))
