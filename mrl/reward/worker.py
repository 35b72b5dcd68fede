"""What runs inside a verifier process: `python -m mrl.reward.worker FD KIND [FUNCTION]`.

Requests arrive pickled over the socket FD, replies go back as JSON; end-of-file ends the process. Standard output is
the verifier's own to print to, so it is no part of the protocol.
"""
from __future__ import annotations

import ctypes
import json
import math
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

_PR_SET_PDEATHSIG = 1
# Sampled text such as 9^{9^{9^9}} makes a computer-algebra system fill the machine before its time is up.
_MATH_MEMORY_BYTES = 4 << 30


def main(fd: int, kind: str, function: str | None) -> None:
    """Serve requests ("score", prompt, response, answer, row) and ("check", answer) until end-of-file."""
    _die_with_parent()
    os.set_inheritable(fd, False)
    connection = Connection(fd)
    try:
        verifier = _verifier(kind, function)
    except BaseException as error:
        connection.send_bytes(json.dumps({"broken": _describe(error)}).encode())
        return
    connection.send_bytes(json.dumps({"ready": True}).encode())
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(json.dumps(_reply(request, verifier)).encode())


class _Verifier(NamedTuple):
    score: Callable[[Any, str, Any, Mapping[str, Any]], Any]
    """(prompt, response, answer, row) -> reward"""
    extract: Callable[[str], str | None]
    """response -> the answer in it, for people to read"""
    check: Callable[[Any], None]
    """Raises if a reference answer is unusable."""


def _verifier(kind: str, function: str | None) -> _Verifier:
    """The verifier of a kind; only that kind's libraries are imported."""
    if kind == "custom":
        from mrl.reward import custom
        return _Verifier(custom.load(function or ""), lambda response: None, lambda answer: None)
    if kind == "exact":
        from mrl.reward import exact as rules
    elif kind == "math":
        _limit_memory(_MATH_MEMORY_BYTES)
        from mrl.reward import math as rules
    else:
        raise ValueError(f"reward.kind {kind!r} is unknown: use math, exact or custom")
    return _Verifier(lambda prompt, response, answer, row: rules.score(response, answer),
                     rules.extract_answer, rules.check_gold)


def _reply(request: bytes, verifier: _Verifier) -> dict[str, Any]:
    try:
        operation, *arguments = pickle.loads(request)
        if operation == "check":
            verifier.check(*arguments)
            return {"reward": 0.0}
        value = verifier.score(*arguments)
        _, response, *_ = arguments
        extracted = verifier.extract(response)
    # SystemExit and the like are a verifier's faults too, and must not end the process unexplained.
    except BaseException as error:
        return {"error": _describe(error)}
    return _checked(value, extracted)


def _checked(value: Any, extracted: str | None) -> dict[str, Any]:
    if not hasattr(type(value), "__float__"):
        return {"invalid": f"the reward function returned {value!r:.200} ({type(value).__name__}), not a number"}
    try:
        reward = float(value)
    except Exception as error:
        return {"invalid": f"the reward function returned a {type(value).__name__}, not a number: {_describe(error)}"}
    if not math.isfinite(reward):
        return {"invalid": f"the reward function returned {reward}, which is not finite"}
    return {"reward": reward, "extracted": extracted}


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:1000]


def _limit_memory(limit: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _die_with_parent() -> None:
    """End this process when its parent does, even while a verifier hangs and nobody reads the socket."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None)
