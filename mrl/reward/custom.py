"""The `custom` reward: a function of the user's, loaded from a file in the verifier process."""
from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_MODULE = "mrl_custom_reward"
_POSITIONAL = ("prompt", "response", "answer")


def load(function: str) -> Callable[..., Any]:
    """Load 'path.py:name'.

    The file's folder is appended to the module search path, so that it may import its neighbours.

    Returns:
        f(prompt, response, answer, row) -> Any, which passes on those columns of the row that the user's function
        has parameters for (all of them if it takes **keywords).

    Raises:
        ValueError: not of the form 'path.py:name', no such file, or no such function in it.
    """
    file, _, name = function.rpartition(":")
    path = Path(file)
    if not file or not name:
        raise ValueError(f"reward.function is {function!r}: write it as path.py:function")
    if not path.is_file():
        raise ValueError(f"reward.function is {function!r}: there is no file {path.resolve()}")
    sys.path.append(str(path.resolve().parent))
    # Under a name of ours: a file called json.py must not become everybody's json.
    spec = importlib.util.spec_from_file_location(_MODULE, path.resolve())
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module
    spec.loader.exec_module(module)
    reward = getattr(module, name, None)
    if not callable(reward):
        known = sorted(key for key, value in vars(module).items() if inspect.isfunction(value))
        raise ValueError(f"reward.function is {function!r}: {path} has no function {name} (it has: {', '.join(known)})")

    parameters = inspect.signature(reward).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    accepted = {parameter.name for parameter in parameters}

    def call(prompt: Any, response: str, answer: Any, row: Mapping[str, Any]) -> Any:
        extra = {key: value for key, value in row.items()
                 if key not in _POSITIONAL and (takes_all or key in accepted)}
        return reward(prompt, response, answer, **extra)

    return call
