"""What an experiment finds installed on this machine, what each package buys, and what happens without it.

Looks packages up without importing them: a broken build of one must not keep the list from being shown.
"""
from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from typing import NamedTuple

from mrl.config.schema import Experiment
from mrl.engine.probe import look_into
from mrl.engine.versions import TESTED, version_warning

NOT_FOUND = "not found"


class Component(NamedTuple):
    """A package of the trainers' environment. `distribution`: its name for pip; `module`: for Python."""

    distribution: str
    module: str
    buys: str
    without: str


COMPONENTS = (
    Component("torch", "torch", "everything", "nothing runs"),
    Component("megatron-core", "megatron.core", "the trainers: model, parallel layouts, optimizer",
              "no training; mrl check, eval and export of a Hugging Face directory still work"),
    Component("transformer-engine", "transformer_engine",
              "fused and flash attention over packed sequences, grouped expert GEMMs, fused norms, rotary and Adam",
              "attention by torch on padded groups of sequences, experts one by one: right, but slow on GPUs"),
    Component("transformer-engine-torch", "transformer_engine_torch", "Transformer Engine's half for torch",
              "Transformer Engine is not used"),
    Component("flash-attn", "flash_attn", "one more attention kernel that Transformer Engine may choose",
              "cuDNN's fused attention is used"),
    Component("apex", "apex", "fused Adam and gradient norms where Transformer Engine is missing",
              "Transformer Engine's kernels, or torch's"),
    Component("apex's weight gradients", "fused_weight_gradient_mlp_cuda",
              "with Transformer Engine: the output layer's weight gradient is added to the gradient buffer by the "
              "matrix product itself",
              "it is made first, then added"),
    Component("ray", "ray", "the actors of engines and rollout workers", "no training, no evaluation"),
    Component("tensorboard", "tensorboard", "event files (log.tensorboard)", "metrics.jsonl alone"),
    Component("datasets", "datasets", "prompts from hf:name", ".jsonl and .parquet files"),
)


def trainer_rows() -> list[tuple[str, str, str, str]]:
    """(package, version or "not found", what it buys, what happens without) of the environment that mrl runs in."""
    return [("python", platform.python_version(), "", ""), ("GPUs", _gpus(), "", "cluster.device: cpu"),
            *((part.distribution, _version(part), part.buys, part.without) for part in COMPONENTS)]


def engine_rows(exp: Experiment | None) -> list[tuple[str, str, str, str, str]]:
    """(engine, version or "not found", where, what it buys, what is wrong or what happens without it).

    Of the experiment's engine; without one, of all, each where launch/setup.sh puts it or MRL_<ENGINE>_PYTHON says.
    """
    if exp:
        return [_engine_row(exp.rollout.engine, exp.rollout.python)]
    home = os.environ.get("MRL_HOME", ".mrl")
    return [_engine_row(name, os.environ.get(f"MRL_{name.upper()}_PYTHON", f"{home}/{name}/bin/python"))
            for name in TESTED]


def _engine_row(name: str, python: str) -> tuple[str, str, str, str, str]:
    found = look_into(python, name)
    others = " or ".join(other for other in TESTED if other != name)
    return (name, found.version or (NOT_FOUND if found.problem else "version unknown"), f"rollout.python: {python}",
            f"samples for training and evaluation, teachers; tested: {' and '.join(TESTED[name])}",
            found.problem or version_warning(name, found.version) or f"rollout.engine: {others}")


def _version(part: Component) -> str:
    try:
        return importlib.metadata.version(part.distribution)
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        return "installed, version unknown" if importlib.util.find_spec(part.module) else NOT_FOUND
    except ModuleNotFoundError:  # of the package around it
        return NOT_FOUND


def _gpus() -> str:
    """Names of the GPUs that the driver lists, and the driver's version."""
    if shutil.which("nvidia-smi") is None:
        return "none (no nvidia-smi)"
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    listed = subprocess.run(query, capture_output=True, text=True, timeout=60)
    return listed.stdout.strip() or f"none ({listed.stderr.strip()})"
