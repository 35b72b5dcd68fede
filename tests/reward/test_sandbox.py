"""What a program in the sandbox can and cannot do, at every level that this machine allows."""
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mrl.reward.sandbox import Limits, Sandbox


@pytest.fixture(scope="module")
def sandbox():
    return Sandbox(Limits(seconds=60.0, memory_mb=256, file_mb=2, processes=8))


@pytest.fixture(params=["namespaces", "user", "none"])
def at_each_level(request, monkeypatch):
    monkeypatch.setattr("mrl.reward.sandbox._LEVELS", (request.param,))
    try:
        return Sandbox(Limits(seconds=60.0, memory_mb=256, file_mb=2, processes=8))
    except RuntimeError as error:
        pytest.skip(str(error))


def left_behind(marker):
    """Processes whose command line or environment holds the marker."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found += [folder.name] if marker.encode() in (folder / "environ").read_bytes() else []
        except OSError:
            pass
    return found


def test_programs_read_and_print(at_each_level):
    assert at_each_level.output("print(input() + 'ä')", "ö\n") == "öä\n"
    assert at_each_level.output("import json, decimal, threading\nt = threading.Thread(target=print, args=[1])\n"
                                "t.start()\nt.join()", "") == "1\n"
    assert at_each_level.output("print(__name__)", "") == "__main__\n"


def test_functions_and_methods_are_called(at_each_level):
    chatty = "def f(a, b):\n    print('noise')\n    return a, [b]"
    assert at_each_level.call(chatty, "f", [1, "x"]) == (True, [1, ["x"]])
    assert at_each_level.call("class Solution:\n    def f(self, a):\n        return {'a': a}", "f", [None]) == (
        True, {"a": None})
    assert at_each_level.call("def g():\n    pass", "f", []) == (False, None)
    assert at_each_level.call("def f():\n    return {1}", "f", []) == (False, None)


@pytest.mark.parametrize("program", [
    "import time\ntime.sleep(600)", "x = bytearray(300 << 20)", "1 / 0", "import sys\nsys.exit(3)",
    "print('x' * (3 << 20))", "open('big', 'w').write('x' * (3 << 20))", "import numpy", "syntax error"])
def test_limits_and_failures_hold_everywhere(at_each_level, program, monkeypatch):
    if "sleep" in program:
        monkeypatch.setattr(at_each_level, "_limits", replace(at_each_level._limits, seconds=2.0))
    assert at_each_level.output(program, "") is None


def test_nothing_outlives_a_run(at_each_level):
    marker = f"MARKER{os.getpid()}{at_each_level.level}"
    daemon = (f"import os, time\nos.environ['X'] = {marker!r}\nif os.fork() == 0:\n    os.setsid()\n"
              "    if os.fork() == 0:\n        os.execve('/bin/sleep', ['sleep', '60'], os.environ)\n    os._exit(0)\n"
              "time.sleep(0.3)\nprint('left')")
    assert at_each_level.output(daemon, "") == "left\n"
    assert not left_behind(marker)


def test_a_fork_bomb_is_stopped_at_the_limit(sandbox):
    if sandbox.level != "namespaces":
        pytest.skip("processes are counted by user, and this one has others")
    bomb = ("import os, time\nn = 0\ntry:\n    while n < 100:\n        if os.fork() == 0:\n            time.sleep(9)\n"
            "        n += 1\nexcept BlockingIOError:\n    print(n)")
    assert sandbox.output(bomb, "") in ("6\n", "7\n")  # of 8, with the program itself and perhaps its supervisor


@pytest.mark.parametrize("attempt", [
    "import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)",
    f"open({str(Path(__file__))!r}).read()", "open('/etc/passwd').read()", "open('/usr/x', 'w')", "open('/x', 'w')",
    "import os\nassert len([p for p in os.listdir('/proc') if p.isdigit()]) > 1", "import os\nos.kill({pid}, 0)",
    "import os\nassert os.getuid() == 0 or 'CapEff:\\t0000000000000000' not in open('/proc/self/status').read()",
    "import os\nassert os.environ.get('SECRET')", "import os\nos.listdir('{folder}')",
])
def test_the_machine_is_out_of_reach(sandbox, attempt, tmp_path, monkeypatch):
    if sandbox.level != "namespaces":
        pytest.skip(f"not allowed on this machine: {sandbox.reason}")
    import socket
    monkeypatch.setenv("SECRET", "1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        attempt = attempt.format(port=server.getsockname()[1], pid=os.getpid(), folder=tmp_path)
        assert sandbox.output(attempt + "\nprint('reached')", "") is None


def test_the_scratch_directory_is_empty_writable_and_bounded(sandbox):
    if sandbox.level != "namespaces":
        pytest.skip(f"not allowed on this machine: {sandbox.reason}")
    writer = "import os\nprint(os.listdir('.'))\nopen('a', 'w').write('1')\nprint(open('a').read())"
    assert sandbox.output(writer, "") == "[]\n1\n"
    assert sandbox.output("for i in range(20):\n    open(str(i), 'w').write('x' * (1 << 20))", "") is None


def test_a_program_dies_with_the_process_that_runs_it(tmp_path):
    """The grader process is killed by the pool when a response takes too long."""
    marker = f"MARKER{os.getpid()}parent"
    source = ("from mrl.reward.sandbox import Limits, Sandbox\n"
              "sandbox = Sandbox(Limits(60.0, 256, 2, 8))\nprint('ready', flush=True)\n"
              "sandbox.output('import os, time\\nos.execve(\"/bin/sleep\", [\"sleep\", \"60\"], '\n"
              f"               '{{\"X\": \"{marker}\"}})', '')")
    parent = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert parent.stdout.readline() == "ready\n"
    deadline = time.monotonic() + 300
    while not left_behind(marker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left_behind(marker)
    os.killpg(parent.pid, 9)
    parent.wait()
    while left_behind(marker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left_behind(marker)


def test_isolation_that_is_required_and_not_there_stops_the_run(monkeypatch):
    from tests.reward.graders import grader

    monkeypatch.setattr("mrl.reward.sandbox._LEVELS", ("none",))
    assert "not cut off from the network" in grader("code").warnings()[0]
    with pytest.raises(RuntimeError, match="isolation is required"):
        grader("code", isolation="required")
