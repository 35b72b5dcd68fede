"""A checkpoint of a run as an ordinary Hugging Face model directory: offline, one process, no torch.distributed."""
from __future__ import annotations

from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from mrl.config.load import load_experiment
from mrl.reshard import Coord, ModelSpec, is_expert, model_spec, read_config
from mrl.reshard.export import export_tensors, save_hf
from mrl.trainer.files import checkpoint_dir, experts_file, model_directory, read_meta, saved_steps, weights_file


def export_run(run: Path, step: int | None, out: Path) -> Path:
    """Write the checkpoint of step `step` (None: the newest) of run directory `run` to the new directory `out`.

    Raises:
        FileNotFoundError: no such run, or no checkpoint of that step; the steps that exist are listed.
        FileExistsError: `out` is not empty.
    """
    checkpoint = _checkpoint(run, step)
    section = load_experiment(run / "config.yaml").model
    model = model_directory(section.path)
    return export_checkpoint(checkpoint, model_spec(read_config(model), section.mtp), model, out)


def export_checkpoint(checkpoint: Path, spec: ModelSpec, model: Path, out: Path) -> Path:
    """Write `checkpoint`, of a model of this spec, to `out`; config and tokenizer come from `model`, the directory that
    training began from."""
    layout, meta = read_meta(checkpoint)
    with ExitStack() as stack:
        @cache
        def opened(file: str) -> Any:
            return stack.enter_context(safe_open(checkpoint / file, framework="pt"))

        def shard(coord: Coord, name: str) -> Tensor:
            return opened(experts_file(layout, coord) if is_expert(name) else weights_file(coord)).get_tensor(name)

        tensors = export_tensors(spec, layout, shard, te=meta["transformer_engine"])
        return save_hf(tensors, model, out)


def _checkpoint(run: Path, step: int | None) -> Path:
    steps = saved_steps(run)
    if not steps:
        raise FileNotFoundError(f"{run}/checkpoints holds no checkpoints (step_N); is {run} a run directory?")
    wanted = steps[-1] if step is None else step
    if wanted not in steps:
        raise FileNotFoundError(f"no checkpoint of step {wanted} in {run}/checkpoints; there are {steps}")
    return checkpoint_dir(run, wanted)
