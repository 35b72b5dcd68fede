"""The `custom` reward: a function of the user's, loaded from a file in the grader process."""
from __future__ import annotations

import asyncio
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl.reward.api import Grade, Grader, Sample

if TYPE_CHECKING:
    from mrl.config.rewards import Custom

_POSITIONAL = ("prompt", "response", "responses", "answer")


class CustomGrader(Grader):
    """What the function returns for one response, or (`batch: true`) for all responses to a prompt."""

    def __init__(self, part: Custom):
        self._function = load(part.function)
        self._accepted = accepted_columns(self._function)

    def grade(self, sample: Sample) -> Grade:
        return Grade(self._call(sample, sample.response))

    def grade_batch(self, samples: list[Sample]) -> list[Any]:
        scores = self._call(samples[0], [sample.response for sample in samples])
        if not isinstance(scores, (list, tuple)) and not hasattr(scores, "tolist"):
            raise TypeError(f"with batch: true the function must return a list of numbers, not {scores!r:.200}")
        scores = list(scores)
        if len(scores) != len(samples):
            raise ValueError(f"the function returned {len(scores)} scores for {len(samples)} responses")
        return scores

    def _call(self, sample: Sample, response: str | list[str]) -> Any:
        columns = {key: value for key, value in sample.row.items()
                   if key not in _POSITIONAL and (self._accepted is None or key in self._accepted)}
        result = self._function(sample.prompt, response, sample.answer, **columns)
        return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Any) -> Any:
    return await result


def accepted_columns(function: Callable[..., Any]) -> set[str] | None:
    """The columns of a row that a function has parameters for; None if it takes **keywords, and so all of them."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters}


def load(reference: str) -> Callable[..., Any]:
    """Load 'path.py:name'. The file's folder is appended to the module search path, so that it may import neighbours.

    Raises:
        ValueError: not of the form 'path.py:name', no such file, or no such function in it.
    """
    file, _, name = reference.rpartition(":")
    path = Path(file)
    if not file or not name:
        raise ValueError(f"function is {reference!r}: write it as path.py:function")
    if not path.is_file():
        raise ValueError(f"function is {reference!r}: there is no file {path.resolve()}")
    sys.path.append(str(path.resolve().parent))
    # Under a name of ours: a file called json.py must not become everybody's json. One a file: several parts may be
    # custom.
    module_name = f"mrl_custom_reward_{abs(hash(path.resolve()))}"
    spec = importlib.util.spec_from_file_location(module_name, path.resolve())
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    reward = getattr(module, name, None)
    if not callable(reward):
        known = sorted(key for key, value in vars(module).items() if inspect.isfunction(value))
        raise ValueError(f"function is {reference!r}: {path} has no function {name} (it has: {', '.join(known)})")
    return reward
