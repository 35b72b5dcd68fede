"""Starting a command so that it, and everything it starts, ends for certain: with us, or when we say so."""
from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Mapping, Optional, Sequence

GUARD = Path(__file__).with_name("guard.py")
TAIL_BYTES = 64 * 1024
CAUSES = 5
ERROR = re.compile(r"\b\w*(Error|Exception|Interrupt)\b: ")


class ProcessTree:
    """A command and all its descendants, under a guard process that ends them when this process ends in any way.

    Output goes to `log_path`, appended. `grace_s`: seconds between SIGTERM and SIGKILL. `env` replaces the environment
    (None: inherited). Once the command has ended, its surviving descendants are ended too.
    """

    def __init__(self, command: Sequence[str], log_path: Path | str, *, env: Optional[Mapping[str, str]] = None,
                 cwd: Path | str | None = None, grace_s: float = 10.0):
        self.command, self.log_path, self.grace_s = list(command), Path(log_path), grace_s
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        read_end, self._write_end = os.pipe()
        try:
            with open(self.log_path, "ab") as log:
                self._log_start = log.tell()
                self._guard = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(GUARD), str(read_end), str(grace_s), *self.command],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, pass_fds=[read_end],
                    env=None if env is None else dict(env), cwd=cwd,
                    start_new_session=True,  # a Ctrl-C at the terminal reaches us alone; we decide what ends when
                )
        except BaseException:
            os.close(self._write_end)
            raise
        finally:
            os.close(read_end)

    @property
    def pid(self) -> int:
        """Process id of the guard; the command is its child."""
        return self._guard.pid

    def poll(self) -> Optional[int]:
        """The command's exit code (128 + n for signal n), or None while it, or a descendant, is alive."""
        return self._guard.poll()

    def wait(self, timeout_s: Optional[float] = None) -> int:
        """Wait for the end. Raises subprocess.TimeoutExpired."""
        return self._guard.wait(timeout_s)

    def stop(self) -> int:
        """End everything, gently first; returns the command's exit code. Takes at most a little over `grace_s`."""
        write_end, self._write_end = self._write_end, None  # taken at once: another thread may stop it too
        if write_end is not None:
            try:
                os.write(write_end, b"stop")  # closing is not enough: a forked copy of us may hold the pipe too
            except BrokenPipeError:
                pass
            os.close(write_end)
        return self._guard.wait()

    def tail(self, lines: int = 40) -> str:
        """The last lines this command has written, and before them those further up that name an error: where one
        process of an engine dies of what another did, the cause is there."""
        with open(self.log_path, "rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, end - TAIL_BYTES))
            written = log.read().decode(errors="replace").splitlines()
        causes = [line for line in written[:-lines] if ERROR.search(line)][-CAUSES:]
        return "\n".join([*causes, *(["[…]"] if causes else []), *written[-lines:]])

    def __enter__(self) -> "ProcessTree":
        return self

    def __exit__(self, *_) -> None:
        self.stop()

