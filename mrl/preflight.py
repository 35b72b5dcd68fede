"""What must be true on this machine before an experiment can start: files, the engine's Python, GPUs.

`preflight` joins these with the pure checks, so that a user sees everything wrong at once, before any process starts.
"""
from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mrl.config.checks import check_experiment
from mrl.config.errors import Problem
from mrl.config.load import is_hub_id
from mrl.config.schema import Experiment
from mrl.data.prompts import DataError, load_prompts

_PROBE_TIMEOUT_S = 60.0


def preflight(exp: Experiment, visible_gpus: int | None) -> tuple[list[Problem], dict[str, Any] | None]:
    """All problems of the experiment on this machine, and the model's config.json (None where it cannot be read).

    `visible_gpus`: as `count_gpus` finds them, or None to plan for another machine without counting.
    """
    problems, hf_config = read_model_config(exp)
    problems += [*check_files(exp), *check_engine_python(exp)]
    return problems + check_experiment(exp, hf_config, visible_gpus), hf_config


def read_model_config(exp: Experiment) -> tuple[list[Problem], dict[str, Any] | None]:
    """config.json of `model.path`; for a hub id it is downloaded (into the Hugging Face cache)."""
    directory = Path(exp.model.path)
    try:
        if is_hub_id(exp.model.path):
            from huggingface_hub import hf_hub_download

            file = Path(hf_hub_download(exp.model.path, "config.json"))
        else:
            file = directory / "config.json"
        return [], json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        reason = f"config.json is not valid JSON: {error}"
    except Exception as error:  # the hub client raises several unrelated families of errors
        if not is_hub_id(exp.model.path):
            missing = "no such directory" if not directory.is_dir() else "the directory has no readable config.json"
            reason = f"{missing} ({error})"
        else:
            reason = f"no directory of that name here, and the hub gave no config.json: {error}"
    return [Problem("model.path", exp.model.path, "a Hugging Face model directory or hub id", reason)], None


def check_files(exp: Experiment) -> Iterator[Problem]:
    """Files that the experiment names: weights and tokenizer, prompts, chat template, reward function."""
    model = Path(exp.model.path)
    if model.is_dir():
        if not any(model.glob("*.safetensors")):
            yield Problem("model.path", exp.model.path, "a model directory with weights (*.safetensors)",
                          "model directory without weights: convert or download them")
        if not (model / "tokenizer.json").exists() and not (model / "tokenizer_config.json").exists():
            yield Problem("model.path", exp.model.path, "a model directory with a tokenizer (tokenizer.json, "
                          "tokenizer_config.json)", "copy the tokenizer files into it")
    for key, value in (("data.train", exp.data.train), ("data.eval", exp.data.eval)):
        if value is not None and not value.startswith("hf:"):
            try:
                load_prompts(value, exp.data)
            except DataError as error:
                yield Problem(key, value, "a .jsonl or .parquet file of prompts and answers, or hf:name[:split]",
                              str(error))
    if exp.model.chat_template is not None and not Path(exp.model.chat_template).is_file():
        yield Problem("model.chat_template", exp.model.chat_template, "an existing file", "no such file")
    if exp.reward.kind == "custom" and exp.reward.function:
        file = exp.reward.function.rpartition(":")[0]
        if file.endswith(".py") and not Path(file).is_file():
            yield Problem("reward.function", exp.reward.function, "an existing Python file", f"no such file: {file}")


def check_engine_python(exp: Experiment) -> Iterator[Problem]:
    """`rollout.python` exists, runs, and finds the engine's package (which is not imported: that takes seconds)."""
    python, package = exp.rollout.python, exp.rollout.engine
    executable = shutil.which(python)
    allowed = f"the Python of an environment that holds {package}"
    if executable is None:
        reason = "not executable" if os.path.exists(python) else "no such file or command"
        yield Problem("rollout.python", python, allowed, f"{reason}; point it to <venv>/bin/python")
        return
    probe = f"import importlib.util as u, sys; sys.exit(0 if u.find_spec({package!r}) else 3)"
    try:
        result = subprocess.run([executable, "-c", probe], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S,
                                cwd=Path(executable).parent)  # away from any folder that has the package's name
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Problem("rollout.python", python, allowed, f"it does not run: {error}")
        return
    if result.returncode == 3:
        yield Problem("rollout.python", python, allowed, f"this Python has no {package}: install it there, or name "
                      "another Python")
    elif result.returncode:
        yield Problem("rollout.python", python, allowed, f"it does not run: {result.stderr.strip()[-500:]}")


def count_gpus() -> int:
    """GPUs this process may use: what nvidia-smi lists, less what CUDA_VISIBLE_DEVICES hides. Makes no CUDA context."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S)
    count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return count
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if "-1" in names:  # CUDA ignores everything from the first invalid name on
        names = names[:names.index("-1")]
    return min(count, len(names))

