"""guard_this_process: a process and its orphans, under a parent that outlives them."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.signals import interruptible

# Leaves behind a process that no signal but SIGKILL ends and that has lost its parent, as engines and Ray do.
PROGRAM = """
import os, signal, subprocess, sys, time
from mrl.engine.guard import guard_this_process
guard_this_process(0.5)
orphan = ("import os, signal, time; os.fork() and os._exit(0); signal.signal(signal.SIGTERM, signal.SIG_IGN); "
          "time.sleep(600)")
subprocess.run([sys.executable, "-c", orphan], start_new_session=True)
print("ready", flush=True)
if sys.argv[1] == "exit":
    sys.exit(7)
time.sleep(600)
"""


def marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("GUARD_TEST") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def program(tmp_path):
    def start(how: str) -> subprocess.Popen:
        process = subprocess.Popen([sys.executable, "-c", PROGRAM, how], stdout=subprocess.PIPE, text=True,
                                   env={**os.environ, "GUARD_TEST": str(tmp_path)}, preexec_fn=interruptible)
        assert process.stdout.readline() == "ready\n"
        return process
    yield start
    for left in marked(str(tmp_path)):
        left.kill()


def ended(mark: str) -> bool:
    deadline = time.monotonic() + 300
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not marked(mark)


def test_its_exit_code_is_passed_on_and_orphans_end(program, tmp_path):
    assert program("exit").wait(300) == 7
    assert ended(str(tmp_path))


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_are_passed_on(program, tmp_path, number, code):
    process = program("stay")
    process.send_signal(number)
    assert process.wait(300) == code
    assert ended(str(tmp_path))


def test_the_guarded_process_is_killed(program, tmp_path):
    process = program("stay")
    assert len(marked(str(tmp_path))) == 3
    child, = psutil.Process(process.pid).children()[:1]
    child.kill()
    assert process.wait(300) == 137
    assert ended(str(tmp_path))
