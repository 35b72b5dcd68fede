"""Scores responses in verifier processes that can be killed. The one door to rewards for the rest of mrl.

A verifier is code over sampled text: it hangs, crashes and raises. Each call therefore runs in a separate process with
a deadline, and whatever happens its caller gets exactly one RewardResult.
"""
from __future__ import annotations

import asyncio
import json
import os
import pickle
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import mrl
from mrl.config import schema

# Importing a verifier's libraries is bounded too, apart from `timeout_s`, which is meant for one call.
_START_TIMEOUT_S = 120.0


class RewardError(RuntimeError):
    """The verifier itself cannot be started or a reference answer cannot be used: nothing could be scored."""


@dataclass(frozen=True)
class RewardResult:
    """One score.

    error: why it is 0 for another reason than a wrong answer, else None.
    extracted: the answer that was found in the response; None if none was, and always for custom functions.
    """

    reward: float
    error: str | None = None
    extracted: str | None = None


class RewardPool:
    """`reward.processes` verifier processes, started when first needed and replaced when they die.

    Made to live in any asyncio program (a Ray actor among them): all blocking work is done in threads of its own, one
    a process, and processes are started afresh, never forked from the caller.
    """

    def __init__(self, reward: schema.Reward):
        self._reward = reward
        self._threads = ThreadPoolExecutor(reward.processes, thread_name_prefix="reward")
        self._slots: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(reward.processes):
            self._slots.put(None)
        self._lock = threading.Lock()
        self._running: set[_Process] = set()
        self._closed = False
        self._counts: Counter[str] = Counter()

    async def score(self, prompt: Any, response_text: str, answer: Any, sample: Mapping[str, Any]) -> RewardResult:
        """Score one response; results come back to their own callers, whatever order they finish in.

        A verifier that hangs, crashes, raises or returns no finite number gives reward 0 with `error` set, counted
        in `metrics()`. Time spent waiting for a free process does not count against `timeout_s`.

        Raises:
            RewardError: the verifier cannot be started, or the pool is closed.
        """
        reply = await self._submit("score", prompt, response_text, answer, dict(sample))
        self._counts["calls"] += 1
        if "reward" in reply:
            return RewardResult(reply["reward"], extracted=reply["extracted"])
        [(fault, message)] = reply.items()
        self._counts[fault] += 1
        return RewardResult(0.0, f"{fault}: {message}")

    async def check_answers(self, answers: Sequence[Any]) -> None:
        """Start the verifier and check every reference answer before a run.

        Raises:
            RewardError: naming the 0-based rows whose answer this reward cannot compare with (the first ten).
        """
        replies = await asyncio.gather(*(self._submit("check", answer) for answer in answers))
        broken = [f"row {row}: {next(iter(reply.values()))}" for row, reply in enumerate(replies)
                  if "reward" not in reply]
        if broken:
            raise RewardError(f"{len(broken)} reference answers are unusable for reward.kind {self._reward.kind}:\n  "
                              + "\n  ".join(broken[:10]))

    def metrics(self) -> dict[str, int]:
        """Counts since the start: calls, and of these timeout, crash, error (exception) and invalid (no number)."""
        return {name: self._counts[name] for name in ("calls", "timeout", "crash", "error", "invalid")}

    def close(self) -> None:
        """Kill all verifier processes and wait for them; calls in progress raise RewardError. May be called twice."""
        with self._lock:
            self._closed = True
            running = list(self._running)
        for process in running:
            process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in running:
            self._forget(process)

    async def _submit(self, *request: Any) -> dict[str, Any]:
        if self._closed:
            raise RewardError("the reward pool is closed")
        return await asyncio.wrap_future(self._threads.submit(self._call, pickle.dumps(request)))

    def _call(self, request: bytes) -> dict[str, Any]:
        """One request on a free process, in a thread. There are as many threads as slots, so one is always free."""
        process = self._slots.get()
        try:
            if process is None:
                process = self._start()
            reply = process.ask(request, self._reward.timeout_s)
            if process.dead:
                self._forget(process)
                process = None
            if self._closed:
                raise RewardError("the reward pool was closed during a call")
            return reply
        finally:
            self._slots.put(process)

    def _start(self) -> _Process:
        with self._lock:
            if self._closed:
                raise RewardError("the reward pool is closed")
            process = _Process(self._reward)
            self._running.add(process)
        ready = process.receive(_START_TIMEOUT_S)
        if "ready" in ready:
            return process
        process.kill()
        self._forget(process)
        reason = next(iter(ready.values()))
        raise RewardError(f"the verifier (reward.kind {self._reward.kind}) does not start: {reason}")

    def _forget(self, process: _Process) -> None:
        with self._lock:
            self._running.discard(process)
        process.disconnect()


class _Process:
    """One verifier process and the socket to it."""

    def __init__(self, reward: schema.Reward):
        ours, theirs = socket.socketpair()
        # A process that does not read must not hold up a large request for ever either.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", max(1, int(reward.timeout_s)), 0))
        package_root = str(Path(mrl.__file__).resolve().parent.parent)
        search_path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-P", "-m", "mrl.reward.worker", str(theirs.fileno()), reward.kind]
        with theirs:
            # A process group of its own, so that a kill takes along what the verifier started.
            self._popen = subprocess.Popen(
                command + ([reward.function] if reward.function else []), pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, start_new_session=True, env=os.environ | {"PYTHONPATH": search_path})
        self._connection = Connection(ours.detach())
        self._reaping = threading.Lock()
        self.dead = False

    def ask(self, request: bytes, timeout_s: float) -> dict[str, Any]:
        """Send a request and wait for the reply; the process is dead if that is a timeout or a crash."""
        deadline = time.monotonic() + timeout_s
        try:
            self._connection.send_bytes(request)
        except OSError:
            return self._crashed()
        return self.receive(deadline - time.monotonic())

    def receive(self, timeout_s: float) -> dict[str, Any]:
        try:
            if not self._connection.poll(max(0.0, timeout_s)):
                self.kill()
                return {"timeout": f"no result within {timeout_s:.1f} s, the verifier process was killed"}
            return json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            return self._crashed()

    def kill(self) -> None:
        """End the process and its group, and reap it. Safe from any thread, any number of times."""
        self.dead = True
        with self._reaping:
            # Once reaped, its number may belong to somebody else.
            if self._popen.returncode is None:
                os.killpg(self._popen.pid, signal.SIGKILL)
                self._popen.wait()

    def disconnect(self) -> None:
        """Free the socket. Only once no thread is in `ask` or `receive`."""
        self._connection.close()

    def _crashed(self) -> dict[str, Any]:
        self.kill()
        return {"crash": f"the verifier process died (exit status {self._popen.returncode})"}
