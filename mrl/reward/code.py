"""The `code` reward: the program in a response passes the reference answer's tests.

The tests are a mapping, or its JSON text: {"inputs": [...], "outputs": [...]} of as many entries. Without "fn_name" an
input is what the program reads and an output what it must print; with it an input is the list of arguments of that
function (or method of class Solution) and an output what it must return.
"""
from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from mrl.reward.api import Grade, Grader, Sample
from mrl.reward.sandbox import Limits, Sandbox
from mrl.reward.text import answer_part

if TYPE_CHECKING:
    from mrl.config.rewards import Code

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*$", re.MULTILINE)
_RELATIVE = 1e-6


class Tests(NamedTuple):
    """function: None where programs read and print."""

    function: str | None
    inputs: list[Any]
    outputs: list[Any]


class CodeGrader(Grader):
    """1 if all tests pass, else 0; or the share that pass. The expected outputs never enter the sandbox."""

    def __init__(self, part: Code):
        self._part = part
        self._sandbox = Sandbox(Limits(part.test_timeout_s, part.memory_mb, part.file_mb, part.processes))
        if part.isolation == "required" and self._sandbox.level != "namespaces":
            raise RuntimeError(f"isolation is required, and this machine does not allow it: {self._sandbox.reason}")

    def warnings(self) -> list[str]:
        if self._sandbox.level == "namespaces":
            return []
        return [f"programs are not cut off from the network and the file system: {self._sandbox.reason}. Only the "
                "limits of time, memory, file size and processes hold. Run mrl where user namespaces are allowed, or "
                "in a container that may be lost"]

    def check(self, answer: Any, row: Mapping[str, Any]) -> None:
        read_tests(answer)

    def grade(self, sample: Sample) -> Grade:
        program = last_program(answer_part(sample.response, self._part.thinking))
        if program is None:
            return Grade(0.0)
        tests = read_tests(sample.answer)
        passed = 0
        for given, expected in zip(tests.inputs, tests.outputs):
            if self._passes(program, tests.function, given, expected):
                passed += 1
            elif self._part.score == "all":
                return Grade(0.0)
        return Grade(passed / len(tests.inputs))

    def _passes(self, program: str, function: str | None, given: Any, expected: Any) -> bool:
        if function is None:
            printed = self._sandbox.output(program, given)
            return printed is not None and _lines(printed) == _lines(expected)
        returned, value = self._sandbox.call(program, function, given)
        return returned and same_value(value, expected)


def last_program(text: str) -> str | None:
    """The last closed ``` block that is marked as Python, or as nothing, without the indentation that all of it has (in
    a list, say); None without one."""
    fences, programs = list(_FENCE.finditer(text)), []
    while len(fences) >= 2:
        opening, closing, *fences = fences
        if opening.group(1).lower() in ("", "python", "python3", "py"):
            programs.append(textwrap.dedent(text[opening.end() + 1:closing.start()]))
    return programs[-1] if programs else None


def read_tests(answer: Any) -> Tests:
    """The tests of a reference answer. Raises ValueError, saying what is wrong with them."""
    try:
        tests = json.loads(answer) if isinstance(answer, str) else answer
        inputs, outputs, function = list(tests["inputs"]), list(tests["outputs"]), tests.get("fn_name")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"the tests {answer!r:.200} are no mapping with inputs and outputs, or its JSON text "
                         f"({type(error).__name__}: {error})") from error
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"the tests have {len(inputs)} inputs and {len(outputs)} outputs: give as many of each, and "
                         "one at least")
    if function is None and not all(isinstance(text, str) for text in inputs + outputs):
        raise ValueError("without fn_name, inputs and outputs must be strings: what is read and what is printed")
    if function is not None and not all(isinstance(arguments, list) for arguments in inputs):
        raise ValueError(f"each input of the function {function!r} must be the list of its arguments")
    return Tests(function, inputs, outputs)


def same_value(value: Any, expected: Any) -> bool:
    """Equal as JSON, tuples being lists; numbers with a decimal point up to 1e-6, relatively; 1 is not true."""
    if isinstance(expected, tuple):
        expected = list(expected)
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, (int, float)) and isinstance(expected, (int, float)):
        exact = isinstance(value, int) and isinstance(expected, int)
        return value == expected if exact else math.isclose(value, expected, rel_tol=_RELATIVE, abs_tol=_RELATIVE)
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(value, dict) and isinstance(expected, Mapping):
        return value.keys() == expected.keys() and all(same_value(value[key], expected[key]) for key in value)
    return value == expected


def _lines(text: str) -> list[str]:
    """Lines without white space at their ends, and without empty ones at the end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]
