"""A process that scores responses and can be killed: the caller's end. `mrl/reward/worker.py` is what runs in it."""
from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import mrl

Reply = Any
"""What the process answered; a mapping {"timeout" or "crash": reason} where it did not."""


class GraderProcess:
    """One process with the graders of `parts` (name -> keys as plain values), and the socket to it.

    send_timeout_s: a process that does not read must not hold up a large request for ever.
    """

    def __init__(self, parts: Mapping[str, Mapping[str, Any]], send_timeout_s: float):
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", max(1, int(send_timeout_s)), 0))
        package_root = str(Path(mrl.__file__).resolve().parent.parent)
        search_path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
        with theirs:
            # A process group of its own, so that a kill takes along what the graders started.
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "mrl.reward.worker", str(theirs.fileno())], pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, start_new_session=True, env=os.environ | {"PYTHONPATH": search_path})
        self._connection = Connection(ours.detach())
        self._reaping = threading.Lock()
        self._parts = pickle.dumps(dict(parts))
        self.dead = False

    def start(self, timeout_s: float) -> Reply:
        """Have it make its graders: {"ready": warnings}, or why it cannot."""
        return self.ask(self._parts, timeout_s)

    def ask(self, request: bytes, timeout_s: float) -> Reply:
        """Send a request and wait for the reply; the process is dead if that is a timeout or a crash."""
        deadline = time.monotonic() + timeout_s
        try:
            self._connection.send_bytes(request)
            if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                self.kill()
                return {"timeout": f"no result within {timeout_s:.1f} s, the process was killed"}
            return json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            self.kill()
            return {"crash": f"the process died (exit status {self._popen.returncode})"}

    def kill(self) -> None:
        """End the process and its group, and reap it. Safe from any thread, any number of times."""
        self.dead = True
        with self._reaping:
            # Once reaped, its number may belong to somebody else.
            if self._popen.returncode is None:
                os.killpg(self._popen.pid, signal.SIGKILL)
                self._popen.wait()

    def disconnect(self) -> None:
        """Free the socket. Only once no thread is in `ask`."""
        self._connection.close()
