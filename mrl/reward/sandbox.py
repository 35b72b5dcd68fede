"""Runs untrusted Python programs: a process each, within limits, cut off from the machine as far as the kernel allows.

The caller's end; `mrl/reward/sandboxed.py` is what runs on the other. Linux only.
"""
from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Level = Literal["namespaces", "user", "none"]
"""How far a program is cut off, the best first.

namespaces: no network, no other processes, no files but the interpreter's and the system's libraries, and an empty /tmp
that goes away with it; user: none of that, but a user id of its own (if mrl runs as root); none: only the limits hold.
"""
_LEVELS: tuple[Level, ...] = ("namespaces", "user", "none")
# The standard library must be in reach of the user that programs run as.
_PROBE = "import decimal\nprint(40 + 2)"
# The sandbox ends a program by itself; this is for one that cannot.
_GRACE_S = 5.0


@dataclass(frozen=True)
class Limits:
    """What a program may use: wall clock (CPU time too), address space, size of each file and of the output."""

    seconds: float
    memory_mb: int
    file_mb: int
    processes: int


class Sandbox:
    """Python programs with the standard library. Raises RuntimeError where not even the limits can be set."""

    def __init__(self, limits: Limits):
        self._limits = limits
        self.reason = ""
        for level in _LEVELS:
            self.level: Level = level
            output, problem = self._run({"program": _PROBE}, b"")
            if output == b"42\n":
                return
            self.reason = self.reason or problem
        raise RuntimeError(f"programs cannot be run in a sandbox on this machine: {problem}")

    def output(self, program: str, stdin: str) -> str | None:
        """What a program writes to standard output; None if it fails or breaks a limit."""
        output, problem = self._run({"program": program}, stdin.encode("utf-8", "surrogateescape"))
        return None if problem else output.decode("utf-8", "replace")

    def call(self, program: str, function: str, arguments: list[Any]) -> tuple[bool, Any]:
        """(whether it returned, what): a function of a program, or a method of its class Solution, called once.

        What it returns arrives as JSON: tuples become lists. What it prints is dropped.
        """
        output, problem = self._run({"program": program, "function": function, "arguments": arguments}, b"")
        if problem:
            return False, None
        try:
            return True, json.loads(output)
        except ValueError:  # something else wrote to the descriptor of the result
            return False, None

    def _run(self, job: dict[str, Any], stdin: bytes) -> tuple[bytes, str]:
        """(standard output, "" or what went wrong)."""
        limits = self._limits
        scratch = tempfile.mkdtemp(prefix="mrl-code-")
        os.chmod(scratch, 0o777)
        # Files in memory: their size is limited like that of others, and a pipe would have to be drained meanwhile.
        job = {**job, "level": self.level, "scratch": scratch, **vars(limits)}
        with (_memory_file(json.dumps(job).encode()) as jobs, _memory_file(stdin) as given,
              _memory_file(b"") as taken, _memory_file(b"") as said):
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(__file__).with_name("sandboxed.py")), str(jobs.fileno())],
                stdin=given, stdout=taken, stderr=said, pass_fds=[jobs.fileno()], cwd=scratch,
                env={"PATH": "/usr/bin:/bin", "HOME": scratch, "TMPDIR": scratch, "LANG": "C.UTF-8"})
            try:
                status = process.wait(limits.seconds + _GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
            taken.seek(0)
            said.seek(0)
            words = said.read(4000).decode("utf-8", "replace").strip().rpartition("\n")[2]
            return taken.read(), "" if status == 0 else f"exit status {status} {words}".strip()


def _memory_file(content: bytes):
    file = os.fdopen(os.memfd_create("mrl-sandbox"), "w+b")
    file.write(content)
    file.seek(0)
    return file
