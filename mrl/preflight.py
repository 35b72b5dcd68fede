"""What must be true on this machine before an experiment can start: files, the engine's Python, GPUs.

The `preflight_*` functions, one a command, join these with the pure checks, so that a user sees everything wrong at
once, before any process starts.
"""
from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mrl.config.checks import check_evaluation, check_experiment
from mrl.config.errors import Problem
from mrl.config.load import is_hub_id
from mrl.config.rewards import Custom, Part, RewardModel
from mrl.config.schema import Data, Experiment, Model
from mrl.config.sft import SftExperiment
from mrl.config.sft_checks import check_sft
from mrl.data.prompts import DataError, load_prompts
from mrl.engine.probe import look_into

_PROBE_TIMEOUT_S = 60.0


Findings = tuple[list[Problem], dict[str, Any] | None]
"""All problems found, and the model's config.json (None where it cannot be read)."""


def preflight_plan(exp: Experiment, visible_gpus: int | None) -> Findings:
    """What would keep `mrl train` from starting, the engine's Python left out: it may be on another machine.

    `visible_gpus`: GPUs to plan for; None: as many as it takes.
    """
    problems, hf_config = read_model_config(exp)
    no_critic, critic_config = read_critic_config(exp)
    no_teacher, teacher_config = read_teacher_config(exp)
    problems += [*no_critic, *no_teacher, *check_files(exp), *check_prompts("data.train", exp.data.train, exp.data),
                 *check_heldout(exp)]
    return problems + check_experiment(exp, hf_config, visible_gpus, critic_config, teacher_config), hf_config


def preflight_training(exp: Experiment) -> Findings:
    """What keeps `mrl train` from starting on this machine."""
    problems, hf_config = preflight_plan(exp, count_gpus())
    return [*problems, *check_engine_python(exp), *check_teacher_python(exp)], hf_config


def preflight_evaluation(exp: Experiment) -> Findings:
    """What keeps `mrl eval` from starting on this machine: it has engines and held-out prompts, but no trainers."""
    problems, hf_config = read_model_config(exp)
    problems += [*check_files(exp), *check_heldout(exp), *check_engine_python(exp)]
    return problems + check_evaluation(exp, hf_config, count_gpus()), hf_config


def preflight_sft(exp: SftExperiment) -> Findings:
    """What keeps `mrl sft` from starting on this machine."""
    problems, hf_config = read_model_config(exp)
    problems += [*check_model_files(exp.model), *check_prompts("data.train", exp.data.train, exp.data)]
    if exp.data.eval is not None:
        problems += check_prompts("data.eval", exp.data.eval, exp.data)
    if (out := Path(exp.out)).exists() and (not out.is_dir() or any(out.iterdir())):
        problems.append(Problem("out", exp.out, "a new or empty directory", "name another, or remove what is there"))
    return problems + check_sft(exp, hf_config, count_gpus()), hf_config


def read_model_config(exp: Experiment | SftExperiment) -> Findings:
    """config.json of `model.path`; for a hub id it is downloaded (into the Hugging Face cache)."""
    return _read_config("model.path", exp.model.path)


def read_critic_config(exp: Experiment) -> Findings:
    """config.json of `algorithm.critic.path`; none where the critic begins as `model.path`, or there is no critic."""
    path = exp.algorithm.critic.path
    return _read_config("algorithm.critic.path", path) if exp.algorithm.has_critic and path else ([], None)


def read_teacher_config(exp: Experiment) -> Findings:
    """config.json of `teacher.path`; none without a teacher."""
    return _read_config("teacher.path", exp.teacher.path) if exp.teacher else ([], None)


def _read_config(key: str, path: str) -> Findings:
    directory = Path(path)
    try:
        if is_hub_id(path):
            from huggingface_hub import hf_hub_download

            file = Path(hf_hub_download(path, "config.json"))
        else:
            file = directory / "config.json"
        return [], json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        reason = f"config.json is not valid JSON: {error}"
    except Exception as error:  # the hub client raises several unrelated families of errors
        if not is_hub_id(path):
            missing = "no such directory" if not directory.is_dir() else "the directory has no readable config.json"
            reason = f"{missing} ({error})"
        else:
            reason = f"no directory of that name here, and the hub gave no config.json: {error}"
    return [Problem(key, path, "a Hugging Face model directory or hub id", reason)], None


def check_files(exp: Experiment) -> Iterator[Problem]:
    """Files that the experiment names: weights and tokenizer, chat template, reward function, where weights go."""
    yield from check_model_files(exp.model)
    if exp.algorithm.has_critic and exp.algorithm.critic.path:
        if Path(exp.algorithm.critic.path).is_dir():
            yield from _check_model_directory("algorithm.critic.path", exp.algorithm.critic.path)
    if exp.teacher and Path(exp.teacher.path).is_dir():
        yield from _check_model_directory("teacher.path", exp.teacher.path)
    for key, reward in exp.rewards.items():
        for name, part in reward.parts.items():
            yield from _check_part_files(f"{key}.parts.{name}", part)
    shared = exp.sync.disk_dir
    if shared is not None and not (Path(shared).is_dir() and os.access(shared, os.W_OK | os.X_OK)):
        yield Problem("sync.disk_dir", shared, "an existing directory that can be written",
                      "make it, or mount the file system that trainers and engines share")


def check_model_files(model: Model) -> Iterator[Problem]:
    """Weights, tokenizer and chat template."""
    if Path(model.path).is_dir():
        yield from _check_model_directory("model.path", model.path)
    if model.chat_template is not None and not Path(model.chat_template).is_file():
        yield Problem("model.chat_template", model.chat_template, "an existing file", "no such file")


def _check_weights(key: str, path: str) -> Iterator[Problem]:
    if not any(Path(path).glob("*.safetensors")):
        yield Problem(key, path, "a model directory with weights (*.safetensors)",
                      "model directory without weights: convert or download them")


def _check_model_directory(key: str, path: str) -> Iterator[Problem]:
    directory = Path(path)
    yield from _check_weights(key, path)
    if not (directory / "tokenizer.json").exists() and not (directory / "tokenizer_config.json").exists():
        yield Problem(key, path, "a model directory with a tokenizer (tokenizer.json, tokenizer_config.json)",
                      "copy the tokenizer files into it")


def _check_part_files(key: str, part: Part) -> Iterator[Problem]:
    """Files that a part of the reward names."""
    if isinstance(part, Custom):
        file = part.function.rpartition(":")[0]
        if file.endswith(".py") and not Path(file).is_file():
            yield Problem(f"{key}.function", part.function, "an existing Python file", f"no such file: {file}")
    if isinstance(part, RewardModel) and part.instruction is not None and not Path(part.instruction).is_file():
        yield Problem(f"{key}.instruction", part.instruction, "an existing file", "no such file")


def check_heldout(exp: Experiment) -> Iterator[Problem]:
    """The prompts of every held-out data set."""
    for name, dataset in exp.eval.datasets.items():
        yield from check_prompts(f"eval.datasets.{name}.path", dataset.path, dataset.columns(exp.data),
                                 dataset.subset_key)


def check_prompts(key: str, source: str, data: Data, subset_key: str | None = None) -> Iterator[Problem]:
    """The prompts that `key` names: every row of a file. A Hugging Face data set is not downloaded for it."""
    allowed = "a .jsonl or .parquet file of prompts and answers, or hf:name[:split]"
    if source.startswith("hf:"):
        if importlib.util.find_spec("datasets") is None:
            yield Problem(key, source, allowed, "hf: needs the Hugging Face datasets library, which is not installed: "
                          f"{sys.executable} -m pip install datasets")
        return
    try:
        load_prompts(source, data, subset_key)
    except DataError as error:
        yield Problem(key, source, allowed, str(error))


def check_engine_python(exp: Experiment) -> Iterator[Problem]:
    """`rollout.python` exists, runs, and finds the engine's package."""
    python, package = exp.rollout.python, exp.rollout.engine
    if reason := look_into(python, package).problem:
        yield Problem("rollout.python", python, f"the Python of an environment that holds {package}", reason)


def check_teacher_python(exp: Experiment) -> Iterator[Problem]:
    """`teacher.python`, likewise, if there is a teacher."""
    if exp.teacher and (reason := look_into(exp.teacher.python, exp.teacher.engine).problem):
        yield Problem("teacher.python", exp.teacher.python, "the Python of an environment that holds "
                      f"{exp.teacher.engine}", reason)


def count_gpus() -> int:
    """GPUs this process may use: what nvidia-smi lists, less what CUDA_VISIBLE_DEVICES hides. Makes no CUDA context."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S)
    count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    names = visible_devices()
    return count if names is None else min(count, len(names))


def visible_devices() -> list[str] | None:
    """Names (indices or UUIDs) in CUDA_VISIBLE_DEVICES; None where it is not set, and every GPU may be used."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return names[:names.index("-1")] if "-1" in names else names  # CUDA ignores everything from an invalid name on
