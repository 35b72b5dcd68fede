"""What an experiment finds installed on this machine, what each package buys, and what happens without it.

Looks packages up without importing them: a broken build of one must not keep the list from being shown.
"""
from __future__ import annotations

import importlib.metadata
import importlib.util
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
    Component("ray", "ray", "the actors of engines and rollout workers", "no training, no evaluation"),
    Component("tensorboard", "tensorboard", "event files (log.tensorboard)", "metrics.jsonl alone"),
    Component("datasets", "datasets", "prompts from hf:name", ".jsonl and .parquet files"),
)


def trainer_rows() -> list[tuple[str, str, str, str]]:
    """(package, version or "not found", what it buys, what happens without) of the environment that mrl runs in."""
    return [("python", platform.python_version(), "", ""), ("GPUs", _gpus(), "", "cluster.device: cpu"),
            *((part.distribution, _version(part), part.buys, part.without) for part in COMPONENTS)]


def engine_rows(exp: Experiment | None) -> list[tuple[str, str, str, str]]:
    """(engine, version or problem, where or which versions are tested, a warning or "") of the experiment's engine.

    Without an experiment: the engines that can be named.
    """
    if exp is None:
        return [(name, "", f"tested: {' and '.join(tested)}", "looked for with an EXPERIMENT")
                for name, tested in TESTED.items()]
    name, python = exp.rollout.engine, exp.rollout.python
    found = look_into(python, name)
    warning = found.problem or version_warning(name, found.version) or ""
    return [(name, found.version or (NOT_FOUND if found.problem else "?"), f"rollout.python: {python}", warning)]


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
