"""A small process that stands between mrl and what it starts, so that nothing outlives mrl, however mrl ends.

`python guard.py PIPE_FD GRACE_S COMMAND…` runs COMMAND and adopts everything that COMMAND's family leaves behind
(child subreaper). When the pipe's other end closes or says stop, when the parent is gone, or when COMMAND ends, every
descendant gets SIGTERM, and SIGKILL once GRACE_S seconds have passed; files in shared memory that they leave behind are
removed. Exits with COMMAND's code (128 + n for signal n).

`guard_this_process` does the same for a running process.

Standard library only, and nothing of mrl is imported: it starts in milliseconds under any Python.
"""
import ctypes
import os
import re
import select
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PARENT_POLL_S = 1.0
REAP_POLL_S = 0.02


def prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def descendants(root: int) -> list[int]:
    """Living processes below `root`; zombies are not living."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:  # it has just ended
                continue
            if fields[0] != b"Z":
                children.setdefault(int(fields[1]), []).append(int(entry))
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def signal_all(number: int) -> None:
    """Signal every descendant."""
    for pid in descendants(os.getpid()):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def reap(codes: dict[int, int]) -> bool:
    """Collect every child that has ended. False when there is no other: then there is no descendant either."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        codes[pid] = os.waitstatus_to_exitcode(status)


def shared_memory(pids: list[int], since: float) -> set[str]:
    """Shared memory that these processes have mapped and made: engines that are killed leave it behind.

    Made: right in /dev/shm, by our user, after the time `since`, and mapped by nobody else. A user's own files may
    lie in /dev/shm too.
    """
    family, ours, others = set(pids), set(), set()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/maps") as file:
                mapped = re.findall(r"^.* (/dev/shm/[^/\s]+)$", file.read(), re.MULTILINE)  # not "(deleted)" ones
        except OSError:  # it has just ended, or is another user's
            continue
        (ours if int(entry) in family else others).update(mapped)
    return {path for path in ours - others if _made_by_us(path, since)}


def _made_by_us(path: str, since: float) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return status.st_uid == os.getuid() and min(status.st_ctime, status.st_mtime) >= since


def end_descendants(grace_s: float, codes: dict[int, int], since: float) -> None:
    """SIGTERM, and SIGKILL once `grace_s` seconds have passed, until no descendant is left; their shared memory
    made after the time `since`."""
    deadline = time.monotonic() + grace_s
    left_behind = shared_memory(descendants(os.getpid()), since)
    signal_all(signal.SIGTERM)
    while reap(codes):
        time.sleep(REAP_POLL_S)
        if time.monotonic() > deadline:
            signal_all(signal.SIGKILL)
    for path in left_behind:
        try:
            os.unlink(path)
        except OSError:  # somebody was faster
            pass


def guard_this_process(grace_s: float) -> None:
    """From here on, everything this process starts ends with it, however it ends: SIGKILL included.

    Forks. The child returns and goes on; the parent stays behind to pass on signals, to end what the child leaves, and
    to exit with its code. If the parent is killed, the child gets SIGTERM. Call it before threads are started.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    since = time.time()
    passed_on = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    # Blocked, and taken by sigwait: a handler would not run if its signal came just before a wait for the child.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, passed_on | {signal.SIGCHLD})
    parent, child = os.getpid(), os.fork()
    if child == 0:
        os.setpgid(0, 0)  # so that a Ctrl-C at the terminal comes once, through the parent
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)
        return
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    codes: dict[int, int] = {}
    while child not in codes:
        number = signal.sigwait(passed_on | {signal.SIGCHLD})
        if number in passed_on:
            os.kill(child, number)
        reap(codes)
    code = codes[child]
    end_descendants(grace_s, codes, since)
    os._exit(code if code >= 0 else 128 - code)


def main(pipe: int, grace_s: float, command: list[str]) -> int:
    parent, since = os.getppid(), time.time()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    stop_signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    for number in (signal.SIGCHLD, *stop_signals):
        signal.signal(number, lambda *_: None)
    # If the guard itself is killed, the command at least must not run on unguarded.
    child = subprocess.Popen(command, preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL)).pid
    codes: dict[int, int] = {}
    stopping = False
    while child not in codes and not stopping:
        ready = select.select([pipe, wake_read], [], [], PARENT_POLL_S)[0]
        if wake_read in ready:
            stopping = any(number in stop_signals for number in os.read(wake_read, 512))
        stopping = stopping or pipe in ready or os.getppid() != parent
        reap(codes)

    end_descendants(grace_s, codes, since)
    code = codes.get(child, -signal.SIGKILL)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    try:
        exit_code = main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
    except OSError as error:
        print(f"cannot start {sys.argv[3:]}: {error}", file=sys.stderr, flush=True)
        exit_code = 127
    sys.exit(exit_code)
