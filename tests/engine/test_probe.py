"""What the probe says of a Python: one that is not there, cannot run, lacks the engine, or holds it."""
import re
import subprocess
import sys

import pytest

from mrl.engine.probe import Found, look_into


def test_a_python_that_holds_the_package():
    assert look_into(sys.executable, "json") == Found(None, None)
    assert look_into(sys.executable, "pytest") == Found(None, pytest.__version__)


def test_a_python_without_the_package():
    assert "has no no_such_engine: install it there" in look_into(sys.executable, "no_such_engine").problem


def test_a_python_that_is_not_there():
    assert look_into("/nowhere/python", "json").problem == "no such file or command; point it to <venv>/bin/python"


@pytest.mark.parametrize("mode, text, words", [
    (0o644, "", "not executable"),
    (0o755, "not a program", "it does not run: .*Exec format"),
    (0o755, "#!/bin/sh\necho broken interpreter >&2; exit 1\n", "it does not run: broken interpreter"),
])
def test_a_python_that_cannot_run(tmp_path, mode, text, words):
    path = tmp_path / "python"
    path.write_text(text)
    path.chmod(mode)
    assert re.search(words, look_into(str(path), "json").problem)


def test_the_check_needs_nothing_heavy():
    code = ("import sys, mrl.engine.probe, mrl.engine.flags, mrl.engine.versions; "
            "sys.exit(any(name in sys.modules for name in ('aiohttp', 'torch', 'pydantic')))")
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
