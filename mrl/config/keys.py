"""The keys of the experiment file as a flat table, derived from the schema: for `mrl check --keys`, for error messages
("allowed", "did you mean") and for the documentation."""
from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass

from mrl.config.rewards import KINDS, Part, Server, TextPart
from mrl.config.schema import Experiment
from mrl.config.section import Section

REQUIRED = "required"
NAME = "<name>"
"""Stands in a key for a name that the user chooses."""


@dataclass(frozen=True)
class Key:
    """One dotted key. `default` is YAML/JSON text, or `REQUIRED`; `section` is true for a mapping of further keys.

    `repeated`: the key is one of a section that is listed elsewhere, too.
    """

    name: str
    type: str
    default: str
    description: str
    section: bool = False
    repeated: bool = False


@functools.cache
def all_keys(kind: type[Section] = Experiment) -> dict[str, Key]:
    """Sections and leaves of a kind of file by dotted name, in the order of the schema."""
    schema = kind.model_json_schema()
    return {key.name: key for key in _walk(schema, schema.get("$defs", {}), "", set())}


def leaf_keys(kind: type[Section] = Experiment) -> list[Key]:
    """The keys that hold values, in the order of the schema, each kind of section once."""
    return [key for key in all_keys(kind).values() if not key.section and not key.repeated]


def part_keys() -> list[tuple[str, Key]]:
    """(which kinds, key) of everything that a part of `reward` can have, `kind` itself left out; each key once."""
    owners = {"every kind": Part, "all that seek an answer": TextPart, "all behind a server": Server, **KINDS}
    listed = []
    for owner, part in owners.items():
        inherited = list(all_keys(part.__base__).values()) if part is not Part else []
        listed += [(owner, key) for key in all_keys(part).values() if key not in inherited and key.name != "kind"]
    return listed


def find_key(name: str, kind: type[Section]) -> Key | None:
    """The key itself, or the key whose value contains it (`rollout.args.0` is part of `rollout.args`)."""
    keys = all_keys(kind)
    name = _with_placeholders(name, keys)
    while name and (name not in keys):
        name = name.rpartition(".")[0]
    return keys.get(name)


def sibling_keys(name: str, kind: type[Section]) -> list[str]:
    """Last parts of the known keys of the section that `name` is, or would be, in."""
    keys = all_keys(kind)
    parent = _with_placeholders(name.rpartition(".")[0], keys)
    return [known.rpartition(".")[2] for known in keys if known.rpartition(".")[0] == parent]


def nearest_key(name: str, kind: type[Section]) -> str | None:
    """The known key a user most likely meant by an unknown one: a sibling with a similar name, else a key of the same
    name in another section, else whatever is spelled most alike."""
    parent, _, leaf = name.rpartition(".")
    names = [known for known in all_keys(kind) if NAME not in known]
    if close := difflib.get_close_matches(leaf, sibling_keys(name, kind), n=1):
        return f"{parent}.{close[0]}" if parent else close[0]
    if same := [known for known in names if known.rpartition(".")[2] == leaf]:
        return same[0]
    close = difflib.get_close_matches(name, names, n=1)
    return close[0] if close else None


def _with_placeholders(name: str, keys: dict[str, Key]) -> str:
    """The key with NAME in place of every name that the user chose."""
    done = ""
    for part in filter(None, name.split(".")):
        if f"{done}{part}" not in keys and any(key.startswith(f"{done}{NAME}.") for key in keys):
            part = NAME
        done += f"{part}."
    return done.removesuffix(".")


def _walk(section: dict, definitions: dict, prefix: str, seen: set[str], repeated: bool = False) -> Iterator[Key]:
    """`seen`: titles of the kinds of section met before; an optional section of such a kind is repeated."""
    seen.add(section["title"])
    required = section.get("required", [])
    for name, field in section["properties"].items():
        dotted, about = prefix + name, field.get("description", "")
        default = REQUIRED if name in required else json.dumps(field.get("default"))
        optional, *_ = field.get("anyOf", [{}])
        if "$ref" in field:
            inner = _definition(field, definitions)
            yield Key(dotted, _mapping_text(inner), default, "", section=True)
            yield from _walk(inner, definitions, f"{dotted}.", seen, repeated)
        elif "patternProperties" in field:
            inner = _definition(*field["patternProperties"].values(), definitions)
            yield Key(dotted, "a mapping of names (letters, digits, _) to sections", default, about, repeated=repeated)
            yield from _walk(inner, definitions, f"{dotted}.{NAME}.", seen, repeated)
        elif "$ref" in optional:
            inner = _definition(optional, definitions)
            yield Key(dotted, "a mapping or null", default, about, repeated=repeated)
            yield from _walk(inner, definitions, f"{dotted}.", seen, repeated or inner["title"] in seen)
        else:
            yield Key(dotted, _type_text(field), default, about, repeated=repeated)


def _definition(reference: dict, definitions: dict) -> dict:
    return definitions[reference["$ref"].rpartition("/")[2]]


def _mapping_text(section: dict) -> str:
    required = section.get("required", [])
    names = [f"{name} (required)" if name in required else name for name in section["properties"]]
    return "a mapping with the keys " + ", ".join(names)


def _type_text(field: dict) -> str:
    """English for one JSON-schema type as pydantic writes it."""
    if "anyOf" in field:
        return " or ".join(_type_text(choice) for choice in field["anyOf"])
    if "enum" in field:
        return "one of " + ", ".join(field["enum"])
    if "discriminator" in field:
        return f"a mapping with {field['discriminator']['propertyName']} and the keys of that"
    if "const" in field:
        return str(field["const"])
    kind = field["type"]
    if kind == "array":
        if "prefixItems" in field:
            return "a list of " + ", ".join(_type_text(item) for item in field["prefixItems"])
        return f"a list, each {_type_text(field['items'])}"
    if kind == "object":
        return f"a mapping, each value {_type_text(field['additionalProperties'])}"
    text = {"integer": "an integer", "number": "a number", "string": "a string", "boolean": "true or false",
            "null": "null"}[kind]
    return text + _bounds_text(field)


def _bounds_text(field: dict) -> str:
    signs = {"exclusiveMinimum": ">", "minimum": ">=", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {field[name]:g}" for name, sign in signs.items() if name in field]
    if "pattern" in field:
        bounds.append(f"matching {field['pattern']}")
    return " " + " and ".join(bounds) if bounds else ""
