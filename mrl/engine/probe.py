"""Looking into the Python of an engine before a server is started with it.

Imports nothing heavy, because `mrl check` uses it too.
"""
from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Optional

PROBE_TIMEOUT_S = 60.0
_NOT_FOUND = 3


def python_problem(python: str, package: str) -> Optional[str]:
    """What keeps `python` (a path, or a name on PATH) from running `package`, with the remedy; None when nothing does.

    The package is looked for, not imported: importing an engine takes seconds.
    """
    executable = shutil.which(python)
    if executable is None:
        reason = "not executable" if os.path.exists(python) else "no such file or command"
        return f"{reason}; point it to <venv>/bin/python"
    code = f"import importlib.util as u, sys; sys.exit(0 if u.find_spec({package!r}) else {_NOT_FOUND})"
    try:
        result = subprocess.run([executable, "-c", code], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S,
                                cwd=Path(executable).parent)  # away from any folder that has the package's name
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it does not run: {error}"
    if result.returncode == _NOT_FOUND:
        return f"this Python has no {package}: install it there, or name another Python"
    if result.returncode:
        return f"it does not run: {result.stderr.strip()[-500:]}"
    return None
