"""Load, resolve and write experiment files.

`load_experiment` merges files and overrides (`mrl.config.source`), types the result (`mrl.config.schema`) and makes
paths absolute. It reports everything that is wrong at once; checks across keys come after it, in `mrl.config.checks`.
"""
from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from mrl.config import source
from mrl.config.errors import ConfigError, Problem
from mrl.config.keys import all_keys, find_key, nearest_key, sibling_keys
from mrl.config.schema import Experiment, Section, SftExperiment

Kind = TypeVar("Kind", bound=Section)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def load_experiment(path: str | Path, overrides: Sequence[str] = ()) -> Experiment:
    """The experiment of a YAML file, its `base:` files and dotted `key=value` overrides, with absolute paths.

    Raises:
        ConfigError: listing every unreadable file, unknown key, missing key and wrong value, with where it was given.
    """
    return _load(Experiment, path, overrides)[0]


def load_sft(path: str | Path, overrides: Sequence[str] = ()) -> SftExperiment:
    """As `load_experiment`, for a file of supervised fine-tuning."""
    return _load(SftExperiment, path, overrides)[0]


def load_with_origins(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Experiment, dict[str, str]]:
    """As `load_experiment`, and where each key was given (dotted key -> "file:line" or the override), for `locate`."""
    return _load(Experiment, path, overrides)


def _load(kind: type[Kind], path: str | Path, overrides: Sequence[str]) -> tuple[Kind, dict[str, str]]:
    layer = source.read_overrides(overrides).over(source.read_file(Path(path).expanduser()))
    problems = list(layer.problems)
    try:
        experiment = absolute_paths(kind.model_validate(layer.data))
    except ValidationError as error:
        reported = {problem.key for problem in problems}
        unreadable = not layer.data  # then every key would be reported as missing
        if not unreadable:
            translated = [_translate(detail, kind) for detail in error.errors()]
            problems += [problem for problem in translated if problem.key not in reported]
    else:
        if not problems:
            return experiment, layer.origins
    raise ConfigError(locate(problems, layer.origins))


def dump_experiment(experiment: Experiment, path: str | Path) -> None:
    """Write the resolved experiment, every key included, as a file that `load_experiment` reads back unchanged."""
    text = yaml.safe_dump(experiment.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    Path(path).write_text("# The resolved experiment: files, overrides and defaults together.\n" + text,
                          encoding="utf-8")


def locate(problems: Sequence[Problem], origins: Mapping[str, str]) -> list[Problem]:
    """The problems with the origin of their key, or of the innermost section that was given."""
    return [problem if problem.origin else dataclasses.replace(problem, origin=_origin(problem.key, origins))
            for problem in problems]


def is_hub_id(model_path: str) -> bool:
    """Whether `model.path` names a model on the Hugging Face hub: `name` or `owner/name`, and no such directory."""
    return _HUB_ID.fullmatch(model_path) is not None and not os.path.isdir(model_path)


def absolute_paths(experiment: Kind) -> Kind:
    """A copy whose relative paths are absolute, seen from the current directory.

    Symbolic links are kept: a virtual environment's `python` is one, and works only under its own name.
    """
    rules: dict[str, Callable[[str], str]] = {
        "out": _absolute,
        "model.path": lambda value: value if is_hub_id(value) else _absolute(value),
        "model.chat_template": _absolute,
        "algorithm.critic.path": lambda value: value if is_hub_id(value) else _absolute(value),
        "data.train": _absolute_data,
        "data.eval": _absolute_data,
        "reward.function": _absolute_function,
        "rollout.python": lambda value: _absolute(value) if "/" in value else value,
        "log.dir": _absolute,
        "sync.disk_dir": _absolute,
    }
    known = all_keys(type(experiment))
    for key, rule in rules.items():
        if key in known:
            experiment = _with(experiment, key.split("."), rule)
    return experiment


def _with(section: Kind, parts: list[str], rule: Callable[[str], str]) -> Kind:
    """A copy of the section in which `rule` was applied to the key at `parts`, unless that is null."""
    name, *rest = parts
    value = getattr(section, name)
    changed = _with(value, rest, rule) if rest else rule(value) if value else value
    return section.model_copy(update={name: changed})


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def _absolute_data(value: str) -> str:
    return value if value.startswith("hf:") else _absolute(value)


def _absolute_function(value: str) -> str:
    file, colon, function = value.rpartition(":")
    return f"{_absolute(file)}:{function}" if colon and file else value


def _translate(error: Mapping[str, Any], kind: type[Section]) -> Problem:
    """One pydantic error in the words of the experiment file."""
    key = ".".join(str(part) for part in error["loc"] if part != "[key]")
    known = find_key(key, kind)
    if error["type"] == "extra_forbidden":
        near = nearest_key(key, kind)
        allowed = f"unknown key; known here: {', '.join(sibling_keys(key, kind))}"
        return Problem(key, _shown(error["input"]), allowed, f"did you mean {near}?" if near else "")
    if error["type"] == "missing":
        about = f"{known.type} ({known.description})" if known.description else known.type
        return Problem(key, "", f"required; {about}", "add the key")
    remedy = f"write {key}: \"{error['input']}\" to make it a string" if (
        error["type"] == "string_type" and isinstance(error["input"], (bool, int, float))) else ""
    return Problem(key, _shown(error["input"]), known.type if known else error["msg"], remedy)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _origin(key: str, origins: Mapping[str, str]) -> str:
    while key and key not in origins:
        key = key.rpartition(".")[0]
    return origins.get(key, "default")
