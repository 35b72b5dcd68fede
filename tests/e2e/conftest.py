"""The quickstart, run once for all tests of this folder."""
from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.e2e.runs import PROJECT, finish, start

STEPS = 60


@pytest.fixture(scope="session")
def home() -> Path:
    """Where the environments, the quickstart's model and its data are."""
    return Path(os.environ.get("MRL_HOME", PROJECT / ".mrl"))


@pytest.fixture(scope="session")
def quickstart(home, tmp_path_factory) -> SimpleNamespace:
    """`bash launch/quickstart.sh`, the README's first command, shortened to STEPS steps."""
    folder = tmp_path_factory.mktemp("quickstart")
    log, began = folder / "console.log", time.monotonic()
    process = start(["bash", "launch/quickstart.sh", f"loop.steps={STEPS}", f"log.dir={folder}/runs"], log)
    finish(process, log, timeout_s=1200)
    run_dir, = (folder / "runs").iterdir()
    print(f"the quickstart took {time.monotonic() - began:.0f} s")
    return SimpleNamespace(run_dir=run_dir, log=log, console=log.read_text(), steps=STEPS)


@pytest.fixture(scope="session")
def warm_start(quickstart, home) -> Path:
    """The supervised model that RL starts from."""
    return home / "quickstart" / "model"


def mrl(*arguments: str, timeout_s: float = 600) -> subprocess.CompletedProcess:
    from tests.e2e.runs import MRL

    return subprocess.run([str(MRL), *arguments], cwd=PROJECT, capture_output=True, text=True, timeout=timeout_s)
