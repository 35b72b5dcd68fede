"""Nothing that a ProcessTree starts survives: not its end, not ours."""
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mrl.engine.process import ProcessTree

# A command that starts a stubborn, detached grandchild and writes its own and the grandchild's pid.
FAMILY = """
import os, signal, subprocess, sys, time
stubborn = ("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); "
            "time.sleep(600)")
child = subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print(os.getpid(), child.pid, flush=True)
time.sleep({life})
"""


def family(life: float) -> list[str]:
    return [sys.executable, "-c", FAMILY.format(life=life)]


def pids_in(log: Path, timeout_s: float = 300) -> list[int]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        words = log.read_text().split() if log.exists() else []
        if len(words) >= 2:
            return [int(word) for word in words[:2]]
        time.sleep(0.02)
    raise AssertionError(f"no pids in {log}: {log.read_text()}")


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_gone(pids: list[int], timeout_s: float = 300) -> bool:
    deadline = time.monotonic() + timeout_s
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_stop_ends_every_descendant(tmp_path):
    tree = ProcessTree(family(600), tmp_path / "log", grace_s=2.0)
    pids = pids_in(tmp_path / "log")
    assert tree.poll() is None
    assert tree.stop() == 128 + signal.SIGTERM
    assert not any(alive(pid) for pid in pids)


def test_shared_memory_is_not_left_behind(tmp_path):
    shared = Path("/dev/shm") / f"mrl_test_{os.getpid()}"
    hold = (f"import mmap, os, time; file = open({str(shared)!r}, 'wb+'); file.truncate(4096); "
            "memory = mmap.mmap(file.fileno(), 4096); print(os.getpid(), 0, flush=True); time.sleep(600)")
    with ProcessTree([sys.executable, "-c", hold], tmp_path / "log", grace_s=0.3):
        pids_in(tmp_path / "log")
        assert shared.exists()
    assert not shared.exists()


def test_files_in_shared_memory_that_others_made_stay(tmp_path):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, tempfile.NamedTemporaryFile(dir="/dev/shm") as older:
        paths = [Path(older.name), Path(folder) / "model"]
        older.truncate(4096)
        time.sleep(0.1)
        hold = ("import mmap, os, sys, time; "
                "files = [open(path, 'ab+') for path in sys.argv[1:]]; files[1].truncate(4096); "
                "memory = [mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ) for file in files]; "
                "print(os.getpid(), 0, flush=True); time.sleep(600)")
        with ProcessTree([sys.executable, "-c", hold, *map(str, paths)], tmp_path / "log", grace_s=0.3):
            pids_in(tmp_path / "log")
        assert [path.exists() for path in paths] == [True, True]


def test_descendants_end_with_the_command(tmp_path):
    with ProcessTree(family(0.1), tmp_path / "log", grace_s=0.2) as tree:
        pids = pids_in(tmp_path / "log")
        assert tree.wait(300) == 0
        assert not any(alive(pid) for pid in pids)


def test_descendants_end_when_the_parent_is_killed(tmp_path):
    script = (f"from mrl.engine.process import ProcessTree; import os, time\n"
              f"tree = ProcessTree({family(600)!r}, {str(tmp_path / 'log')!r}, grace_s=0.2)\n"
              f"if os.fork() == 0: time.sleep(600); os._exit(0)  # a forked copy that holds the pipe open\n"
              f"time.sleep(600)")
    parent = subprocess.Popen([sys.executable, "-c", script], env=dict(os.environ, PYTHONPATH=os.getcwd()))
    pids = pids_in(tmp_path / "log")
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert wait_gone(pids)


def test_a_killed_guard_takes_the_command_along(tmp_path):
    tree = ProcessTree([sys.executable, "-c", "import os, time; print(os.getpid(), 0, flush=True); time.sleep(600)"],
                       tmp_path / "log")
    command = pids_in(tmp_path / "log")[0]
    os.kill(tree.pid, signal.SIGKILL)
    tree.wait(300)
    assert wait_gone([command])


def test_exit_code_and_tail_of_this_start_only(tmp_path):
    log = tmp_path / "deep" / "log"
    for word in ("first", "second"):
        with ProcessTree([sys.executable, "-c", f"print('{word}'); raise SystemExit(7)"], log) as tree:
            assert tree.wait(300) == 7
            assert tree.tail() == word
    assert log.read_text() == "first\nsecond\n"


def test_tail_names_errors_further_up(tmp_path):
    script = ("print('(Core) ValueError: no room'); "
              "print(*['  frame'] * 50, 'RuntimeError: the core failed', sep=chr(10))")
    with ProcessTree([sys.executable, "-c", script], tmp_path / "log") as tree:
        tree.wait(300)
        assert tree.tail(3).splitlines() == ["(Core) ValueError: no room", "[…]", "  frame", "  frame",
                                             "RuntimeError: the core failed"]


def test_a_command_that_does_not_exist(tmp_path):
    with ProcessTree(["/nonexistent/program"], tmp_path / "log") as tree:
        assert tree.wait(300) == 127
        assert "/nonexistent/program" in tree.tail()
