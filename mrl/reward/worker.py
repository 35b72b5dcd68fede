"""What runs inside a grader process: `python -m mrl.reward.worker FD`.

Requests arrive pickled over the socket FD (the first is the parts of the reward), replies go back as JSON; end-of-file
ends the process. Standard output is the graders' own to print to, so it is no part of the protocol.
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
from typing import Any

from mrl.reward.api import Grade, Grader
from mrl.reward.graders import make_grader

_PR_SET_PDEATHSIG = 1
# Sampled text such as 9^{9^{9^9}} makes a computer-algebra system fill the machine before its time is up.
_MEMORY_BYTES = 4 << 30


def main(fd: int) -> None:
    """Answer requests until end-of-file.

    ("grade", part, sample), ("batch", part, samples) and ("check", part, (answer, row)).
    """
    _die_with_parent()
    os.set_inheritable(fd, False)
    connection = Connection(fd)
    graders: dict[str, Grader] = {}
    _answer(connection, lambda parts: {"ready": _make(parts, graders)})
    while _answer(connection, lambda request: _reply(request, graders)):
        pass


def _answer(connection: Connection, work: Callable[[Any], Any]) -> bool:
    """Serve one request; False at end-of-file. An exception, SystemExit too, is a reply and not the process' end."""
    try:
        request = connection.recv_bytes()
    except EOFError:
        return False
    try:
        reply = work(pickle.loads(request))
    except BaseException as error:
        reply = {"error": _describe(error)}
    connection.send_bytes(json.dumps(reply).encode())
    return True


def _make(parts: Mapping[str, Mapping[str, Any]], graders: dict[str, Grader]) -> list[str]:
    """Fill `graders`; returns what the user should be warned of."""
    # A function of the user's may need more, or libraries that reserve more than they use.
    if all(part["kind"] != "custom" for part in parts.values()):
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = _MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(_MEMORY_BYTES, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    for name, part in parts.items():
        try:
            graders[name] = make_grader(part)
        except BaseException as error:
            raise RuntimeError(f"part {name!r} (kind {part['kind']}): {_describe(error)}") from error
    return [f"reward part {name!r}: {warning}" for name, grader in graders.items() for warning in grader.warnings()]


def _reply(request: tuple[str, str, Any], graders: Mapping[str, Grader]) -> Any:
    operation, name, content = request
    grader = graders[name]
    if operation == "check":
        grader.check(*content)
        return {"checked": True}
    if operation == "batch":
        return [_checked(Grade(score)) for score in grader.grade_batch(content)]
    return _checked(grader.grade(content))


def _checked(grade: Grade) -> dict[str, Any]:
    value = grade.score
    if not hasattr(type(value), "__float__"):
        return {"invalid": f"the reward function returned {value!r:.200} ({type(value).__name__}), not a number"}
    try:
        score = float(value)
    except Exception as error:
        return {"invalid": f"the reward function returned a {type(value).__name__}, not a number: {_describe(error)}"}
    if not math.isfinite(score):
        return {"invalid": f"the reward function returned {score}, which is not finite"}
    return {"score": score, "extracted": grade.extracted}


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:1000]


def _die_with_parent() -> None:
    """End this process when its parent does, even while a grader hangs and nobody reads the socket."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
