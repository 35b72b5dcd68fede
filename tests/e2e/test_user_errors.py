"""What only the running parts can find out still ends as one clear message: exit code 2, no traceback, nothing left."""
from __future__ import annotations

import socket
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from tests.e2e.runs import MRL, assert_nothing_left, start

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def failed(warm_start, tmp_path_factory) -> dict[str, SimpleNamespace]:
    """Runs with one error each, all at once, by its name: exit code, console and the port that was taken."""
    folder = tmp_path_factory.mktemp("errors")
    with ExitStack() as stack:
        port = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        errors = {"prompt": "data.max_prompt_tokens=3", "port": f"rollout.port={port}"}
        processes = {}
        for name, override in errors.items():
            processes[name] = start([str(MRL), "train", "configs/quickstart_cpu.yaml", f"log.dir={folder}", override],
                                    folder / f"{name}.log")
            stack.callback(processes[name].kill)
        codes = {name: process.wait(600) for name, process in processes.items()}
    return {name: SimpleNamespace(code=code, log=folder / f"{name}.log", port=str(port),
                                  console=(folder / f"{name}.log").read_text()) for name, code in codes.items()}


@pytest.mark.parametrize("name, words", [
    ("prompt", ["row 0", "data.max_prompt_tokens is 3"]), ("port", ["rollout.port", "{port}"]),
])
def test_errors_of_the_user_are_named(failed, name, words):
    run = failed[name]
    assert run.code == 2 and "Traceback" not in run.console, run.console[-3000:]
    assert all(word.format(port=run.port) in run.console for word in words), run.console[-3000:]
    assert_nothing_left(run.log)
