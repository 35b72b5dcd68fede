"""Load, resolve and write experiment files.

`load_experiment` merges files and overrides (`mrl.config.source`), types the result (`mrl.config.schema`) and makes
paths absolute. It reports everything that is wrong at once; checks across keys come after it, in `mrl.config.checks`.
"""
from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from mrl.config import source
from mrl.config.errors import ConfigError, Problem
from mrl.config.keys import NAME, all_keys, find_key, nearest_key, sibling_keys
from mrl.config.rewards import KINDS, Part, part_class
from mrl.config.schema import Experiment
from mrl.config.sft import SftExperiment
from mrl.config.section import Section

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


def load_like(experiment: Kind, path: str | Path) -> Kind:
    """As `load_experiment`, for a file of the same kind as `experiment`."""
    return _load(type(experiment), path, ())[0]


def load_with_origins(kind: type[Kind], path: str | Path,
                      overrides: Sequence[str] = ()) -> tuple[Kind, dict[str, str]]:
    """The file as one of that kind, and where each key was given (dotted key -> "file:line" or the override), for
    `locate`. Raises as `load_experiment`."""
    return _load(kind, path, overrides)


def _load(kind: type[Kind], path: str | Path, overrides: Sequence[str]) -> tuple[Kind, dict[str, str]]:
    layer = source.read_overrides(overrides).over(source.read_file(Path(path).expanduser()))
    problems = layer.problems + layer.unset
    try:
        experiment = absolute_paths(kind.model_validate(layer.data))
    except ValidationError as error:
        reported = {problem.key for problem in problems}
        unreadable = not layer.data  # then every key would be reported as missing
        if not unreadable:
            translated = [_translate(detail, layer.data, kind) for detail in error.errors()]
            problems += [problem for problem in translated if problem.key not in reported]
    else:
        if not problems:
            return experiment, layer.origins
    raise ConfigError(locate(problems, layer.origins))


def dump_experiment(experiment: Section, path: str | Path) -> None:
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
    rules: dict[str, Callable[[Any], Any]] = {
        "out": _absolute,
        "model.path": _absolute_model,
        "model.chat_template": _absolute,
        "algorithm.critic.path": lambda value: value if is_hub_id(value) else _absolute(value),
        "data.train": _absolute_data,
        "data.eval": _absolute_data,
        f"eval.datasets.{NAME}.path": _absolute_data,
        f"eval.datasets.{NAME}.reward.parts.{NAME}": _absolute_part,
        f"reward.parts.{NAME}": _absolute_part,
        "rollout.python": _absolute_python,
        "teacher.path": _absolute_model,
        "teacher.python": _absolute_python,
        "log.dir": _absolute,
        "sync.disk_dir": _absolute,
    }
    known = all_keys(type(experiment))
    for key, rule in rules.items():
        if key.partition(f".{NAME}")[0] in known:
            experiment = _with(experiment, key.split("."), rule)
    return experiment


def _with(value: Any, parts: list[str], rule: Callable[[Any], Any]) -> Any:
    """A copy of a section in which `rule` was applied to the key at `parts`, unless that, or a section on the way to
    it, is null. NAME among the parts stands for every name there is."""
    if not value:
        return value
    if not parts:
        return rule(value)
    name, *rest = parts
    if name == NAME:
        return {key: _with(section, rest, rule) for key, section in value.items()}
    return value.model_copy(update={name: _with(getattr(value, name), rest, rule)})


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def _absolute_model(value: str) -> str:
    return value if is_hub_id(value) else _absolute(value)


def _absolute_python(value: str) -> str:
    return _absolute(value) if "/" in value else value


def _absolute_data(value: str) -> str:
    return value if value.startswith(("hf:", "reasoning_gym:")) else _absolute(value)


def _absolute_part(part: Part) -> Part:
    """A part of the reward whose files have absolute paths."""
    rules = {"function": _absolute_function, "instruction": _absolute,
             "tokenizer": lambda value: value if is_hub_id(value) else _absolute(value)}
    for name, rule in rules.items():
        if name in type(part).model_fields:
            part = _with(part, [name], rule)
    return part


def _absolute_function(value: str) -> str:
    file, colon, function = value.rpartition(":")
    return f"{_absolute(file)}:{function}" if colon and file else value


def _translate(error: Mapping[str, Any], given: Mapping[str, Any], kind: type[Section]) -> Problem:
    """One pydantic error in the words of the experiment file; `given` is what the file says."""
    place = [str(part) for part in error["loc"] if part != "[key]"]
    if error["type"].startswith("union_tag"):
        return _wrong_kind(_written([*place, "kind"], given), error)
    key, section, name = _written(place, given), kind, ".".join(place)
    part, start = part_class(place)
    if part is not None:
        section, name = part, ".".join(place[start:])
    known = find_key(name, section)
    if error["type"] == "extra_forbidden":
        near = nearest_key(name, section)
        allowed = f"unknown key; known here: {', '.join(sibling_keys(name, section))}"
        return Problem(key, _shown(error["input"]), allowed,
                       f"did you mean {key.removesuffix(name)}{near}?" if near else "")
    if error["type"] == "missing":
        about = f"{known.type} ({known.description})" if known.description else known.type
        return Problem(key, "", f"required; {about}", "add the key")
    if error["type"] == "value_error":
        return Problem(key, _shown(error["input"]), str(error["ctx"]["error"]), "")
    remedy = f"write {key}: \"{error['input']}\" to make it a string" if (
        error["type"] == "string_type" and isinstance(error["input"], (bool, int, float))) else ""
    return Problem(key, _shown(error["input"]), known.type if known else error["msg"], remedy)


def _wrong_kind(key: str, error: Mapping[str, Any]) -> Problem:
    """A part of the reward whose kind is missing or unknown."""
    allowed, given = f"one of {', '.join(KINDS)}", error["ctx"].get("tag")
    if given is None:
        return Problem(key, "", f"required; {allowed}", "add the key")
    near = difflib.get_close_matches(given, KINDS, n=1)
    return Problem(key, repr(given), allowed, f"did you mean {near[0]}?" if near else "")


def _written(place: Sequence[str], given: Any) -> str:
    """The dotted key as the file has it: pydantic's place also names sections that the file left out and kinds."""
    key = []
    for position, part in enumerate(place):
        inside = isinstance(given, dict) and part in given
        if inside or position == len(place) - 1 or isinstance(given, list):
            key.append(part)
            given = given[part] if inside else None
    return ".".join(key)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _origin(key: str, origins: Mapping[str, str]) -> str:
    while key and key not in origins:
        key = key.rpartition(".")[0]
    return origins.get(key, "default")
