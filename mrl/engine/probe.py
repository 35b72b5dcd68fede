"""Looking into the Python of an engine before a server is started with it.

Imports nothing heavy, because `mrl check` uses it too.
"""
from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple, Optional

PROBE_TIMEOUT_S = 60.0
_NOT_FOUND = 3
# The package is looked for, not imported: importing an engine takes seconds. A CPU build may have a name of its own.
_LOOK = """
import importlib.metadata, importlib.util, sys
if importlib.util.find_spec({package!r}) is None:
    sys.exit({not_found})
for name in ({package!r}, {package!r} + "-cpu"):
    try:
        print(importlib.metadata.version(name))
        break
    except importlib.metadata.PackageNotFoundError:
        pass
"""


class Found(NamedTuple):
    """What a look into a Python gave: what keeps it from running the package, and the package's version if it tells."""

    problem: Optional[str] = None
    version: Optional[str] = None


def look_into(python: str, package: str) -> Found:
    """Whether `python` (a path, or a name on PATH) can run `package`. A problem comes with its remedy."""
    executable = shutil.which(python)
    if executable is None:
        reason = "not executable" if os.path.exists(python) else "no such file or command"
        return Found(f"{reason}; point it to <venv>/bin/python")
    code = _LOOK.format(package=package, not_found=_NOT_FOUND)
    try:
        result = subprocess.run([executable, "-c", code], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S,
                                cwd=Path(executable).parent)  # away from any folder that has the package's name
    except (OSError, subprocess.TimeoutExpired) as error:
        return Found(f"it does not run: {error}")
    if result.returncode == _NOT_FOUND:
        return Found(f"this Python has no {package}: install it there, or name another Python")
    if result.returncode:
        return Found(f"it does not run: {result.stderr.strip()[-500:]}")
    return Found(version=result.stdout.strip() or None)
