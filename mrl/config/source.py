"""From files and command-line overrides to one plain mapping that still knows where each key came from.

Here: YAML reading, `${env:NAME}` expansion, `base:` inheritance, overrides, merging. Nothing here knows the schema.
"""
from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mrl.config.errors import Problem

_ENV = re.compile(r"\$\{env:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?:,(?P<default>[^}]*))?\}")
_STR = "tag:yaml.org,2002:str"


@dataclass
class Layer:
    """Data of one or several merged sources.

    Attributes:
        data: nested plain values.
        origins: dotted key -> "file:line", or the override it was given by.
        problems: what could not be read; the rest of `data` is still good.
        unset: values that need an environment variable which is not set. A layer above may replace them.
    """

    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    unset: list[Problem] = field(default_factory=list)

    def over(self, below: Layer) -> Layer:
        """This layer on top of `below`: mappings merge key by key, every other value is replaced."""
        replaced = [key for key in self.origins if not isinstance(_get(self.data, key), dict)]
        kept = {key: origin for key, origin in below.origins.items()
                if not any(key.startswith(f"{top}.") for top in replaced)}
        unset = [problem for problem in below.unset
                 if not any(f"{problem.key}.".startswith(f"{top}.") for top in replaced)]
        return Layer(_merge(below.data, self.data), kept | self.origins, below.problems + self.problems,
                     unset + self.unset)


def read_file(path: Path, descendants: tuple[Path, ...] = ()) -> Layer:
    """One experiment file on top of the chain of its `base:` files; `descendants` are the files that named this one."""
    if path.resolve() in descendants:
        chain = " -> ".join(str(file) for file in (*descendants, path.resolve()))
        return _failed(descendants[-1], "base", str(path), "files that do not inherit from each other in a circle",
                       f"remove one `base:` of {chain}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        source = descendants[-1] if descendants else path
        return _failed(source, "base" if descendants else "experiment file", str(path),
                       "a readable UTF-8 YAML file", str(error))
    layer = _read_text(text, str(path))
    base = layer.data.pop("base", None)
    if base is None:
        return layer
    if not isinstance(base, str):
        layer.problems.append(Problem("base", repr(base), "the path of one YAML file, relative to this one",
                                      origin=layer.origins["base"]))
        return layer
    return layer.over(read_file(path.parent / Path(base).expanduser(), (*descendants, path.resolve())))


def read_overrides(overrides: Sequence[str]) -> Layer:
    """`key.of.a.section=value` strings as one layer; later ones win. Values are YAML."""
    result = Layer()
    for override in overrides:
        key, equals, text = override.partition("=")
        origin = f"override '{override}'"
        if not equals or not all(re.fullmatch(r"\w+", part) for part in key.split(".")):
            result.problems.append(Problem("override", override, "key=value with a dotted key",
                                           "for example loop.steps=10", "command line"))
            continue
        nested = _read_value(text, key, origin)
        result = nested.over(result)
    return result


def _read_value(text: str, key: str, origin: str) -> Layer:
    layer = Layer()
    reader = _Reader(layer, lambda mark: origin)
    value = reader.read(text, key)
    if not layer.problems:
        for part in reversed(key.split(".")):
            value = {part: value}
        layer.data = value
    layer.origins[key] = origin
    return layer


def _read_text(text: str, source: str) -> Layer:
    layer = Layer()
    reader = _Reader(layer, lambda mark: f"{source}:{mark.line + 1}" if mark else source)
    data = reader.read(text, "")
    if isinstance(data, dict):
        layer.data = data
    elif not layer.problems:
        layer.problems.append(Problem("experiment file", repr(data), "a mapping of sections", origin=source))
    return layer


class _Loader(yaml.SafeLoader):
    """YAML 1.2's floats (`1e-6` is a number) and no dates (`2026-01-01` is a string)."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers
                if tag not in ("tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$|[-+]?\.(?:inf|Inf|INF)$"
               r"|\.(?:nan|NaN|NAN)$"),
    list("-+.0123456789"))


class _Reader:
    """Parses one YAML text; notes origins and problems in `layer`. `locate`: the origin of a place in the text."""

    def __init__(self, layer: Layer, locate: Callable[[yaml.Mark | None], str]):
        self._layer = layer
        self._locate = locate
        self._seen: set[int] = set()  # nodes that an alias leads to again

    def read(self, text: str, key: str) -> Any:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None if key else {}
            self._visit(loader, node, key)
            return loader.construct_document(node)
        except yaml.YAMLError as error:
            origin = self._locate(getattr(error, "problem_mark", None))
            reason = getattr(error, "problem", None) or str(error)
            self._layer.problems.append(Problem(key or "YAML", "", "valid YAML", f"{reason}; quote strings that hold "
                                                "any of {}[],:#", origin))
            return None
        finally:
            loader.dispose()

    def _visit(self, loader: _Loader, node: yaml.Node, key: str) -> None:
        if id(node) in self._seen:
            return
        self._seen.add(id(node))
        if key:
            self._layer.origins[key] = self._locate(node.start_mark)
        if isinstance(node, yaml.MappingNode):
            self._visit_mapping(loader, node, key)
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self._visit(loader, item, f"{key}.{index}")
        else:
            self._expand(loader, node, key)

    def _visit_mapping(self, loader: _Loader, node: yaml.MappingNode, key: str) -> None:
        first: dict[str, str] = {}
        for name, value in node.value:
            dotted = f"{key}.{name.value}" if key else str(name.value)
            place = self._locate(name.start_mark)
            if dotted in first:
                self._layer.problems.append(Problem(dotted, "", "each key once",
                                                    f"it was given before, at {first[dotted]}", place))
            first[dotted] = place
            self._visit(loader, value, dotted)
            self._layer.origins.setdefault(dotted, first[dotted])

    def _expand(self, loader: _Loader, node: yaml.ScalarNode, key: str) -> None:
        """Expand `${env:…}` in place. A plain scalar is typed after the expansion, a quoted one stays a string."""
        if "${env:" not in node.value:
            return

        def value_of(match: re.Match) -> str:
            value = os.environ.get(match["name"], "") or match["default"]
            if value is None:
                self._layer.unset.append(Problem(
                    key, node.value, f"a set environment variable {match['name']}",
                    f"export {match['name']}, or give a default: ${{env:{match['name']},default}}",
                    self._locate(node.start_mark)))
            return value or ""

        expanded = _ENV.sub(value_of, node.value)
        if "${env:" in _ENV.sub("", node.value):
            self._layer.problems.append(Problem(key, node.value, "${env:NAME} or ${env:NAME,default}",
                                                origin=self._locate(node.start_mark)))
        node.value = expanded
        if node.style is None:
            node.tag = loader.resolve(yaml.ScalarNode, expanded, (True, False))


def _merge(below: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in top.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _get(data: Any, key: str) -> Any:
    for part in key.split("."):
        data = data.get(part) if isinstance(data, dict) else None
    return data


def _failed(source: Path, key: str, value: str, allowed: str, remedy: str) -> Layer:
    return Layer(problems=[Problem(key, value, allowed, remedy, str(source))])
