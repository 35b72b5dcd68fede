"""Scores the responses of a group. The one door to rewards for the rest of mrl.

Scoring is code over sampled text: it hangs, crashes and raises. Local parts of the reward therefore run in separate
processes with a deadline, parts behind a server with time-outs of their own; whatever happens, each sample gets exactly
one RewardResult, and a fault costs that sample the score of that part alone.
"""
from __future__ import annotations

import asyncio
import logging
import pickle
import queue
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from mrl.config import schema
from mrl.config.rewards import Custom, Part
from mrl.reward.api import RewardError, Sample
from mrl.reward.process import GraderProcess, Reply
from mrl.reward.remote import RemotePart, make_remote

# Importing the libraries of the graders is bounded too, apart from `timeout_s`, which is meant for one call.
_START_TIMEOUT_S = 120.0
# Rewards become float32 numbers.
_LARGEST = 3.0e38
_FAULTS = ("timeout", "crash", "error", "invalid")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RewardResult:
    """The reward of one sample: the sum of weight * score over the parts.

    correct: whether it has full marks in the parts that judge (`reward.accuracy`); one they could not score has not.
    error: what went wrong, by part, where a score is 0 for another reason than the response, else None.
    extracted: the answer that the first part to look for one found, parts that judge before others; None if none did.
    parts: the score of every part, before its weight.
    """

    reward: float
    error: str | None = None
    extracted: str | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    correct: bool = False


class RewardPool:
    """`reward.processes` grader processes, started when first needed and replaced when they die, and the remote parts.

    Made to live in any asyncio program (a Ray actor among them): all blocking work is done in threads of its own, one
    a process, and processes are started afresh, never forked from the caller.
    """

    def __init__(self, reward: schema.Reward):
        self._parts: dict[str, Part] = dict(reward.parts)
        self._judging, self._full_marks = reward.judging, reward.accuracy.full_marks
        self._remote: dict[str, RemotePart] = {
            name: make_remote(name, part) for name, part in self._parts.items() if part.remote}
        self._local = {name: part.model_dump() for name, part in self._parts.items() if not part.remote}
        self._threads = ThreadPoolExecutor(reward.processes, thread_name_prefix="reward")
        self._slots: queue.LifoQueue[GraderProcess | None] = queue.LifoQueue()
        for _ in range(reward.processes):
            self._slots.put(None)
        self._lock = threading.Lock()
        self._running: set[GraderProcess] = set()
        self._warned = self._closed = False
        self._counts: Counter[str] = Counter()

    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """Score responses to one prompt; results are in the order of the samples, whatever order they finish in.

        A part that hangs, crashes, raises or gives no finite number scores 0 for that sample, is counted in `metrics()`
        and logged with the sample's name. Time spent waiting for a free process does not count against `timeout_s`.

        Raises:
            RewardError: a grader cannot be started, or the pool is closed.
        """
        columns = await asyncio.gather(*(self._grade(name, samples) for name in self._parts))
        return [self._combined(sample, dict(zip(self._parts, replies)))
                for sample, replies in zip(samples, zip(*columns, strict=True), strict=True)]

    async def check_answers(self, rows: Sequence[tuple[Any, Mapping[str, Any]]]) -> None:
        """Start the graders, and check every (reference answer, row) before a run.

        Raises:
            RewardError: a server does not answer, or naming the 0-based rows whose answer a part cannot compare with
                (the first ten).
        """
        await asyncio.gather(*(remote.probe() for remote in self._remote.values()))
        for name in self._local:
            part = self._parts[name]
            checked = rows if part.checks_answers else rows[:1]
            replies = await asyncio.gather(*(self._submit("check", name, row) for row in checked))
            broken = [f"row {index}: {next(iter(reply.values()))}" for index, reply in enumerate(replies)
                      if reply != {"checked": True}]
            if broken:
                raise RewardError(f"{len(broken)} reference answers are unusable for the part {name!r} of the reward "
                                  f"(kind {part.kind}):\n  " + "\n  ".join(broken[:10]))

    def metrics(self) -> dict[str, int]:
        """Counts since the start: calls (samples times parts), and of these timeout, crash, error and invalid."""
        return {name: self._counts[name] for name in ("calls", *_FAULTS)}

    def close(self) -> None:
        """Kill all processes and wait for them; calls in progress raise RewardError. May be called twice."""
        with self._lock:
            self._closed = True
            running = list(self._running)
        for process in running:
            process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in running:
            self._forget(process)

    async def _grade(self, name: str, samples: Sequence[Sample]) -> list[Mapping[str, Any]]:
        """One reply a sample: {"score", "extracted"}, or {fault: reason}."""
        part = self._parts[name]
        if name in self._remote:
            return await self._remote[name].grade(samples)
        if isinstance(part, Custom) and part.batch:
            replies = await self._submit("batch", name, list(samples))
            return replies if isinstance(replies, list) else [replies] * len(samples)
        return await asyncio.gather(*(self._submit("grade", name, sample) for sample in samples))

    def _combined(self, sample: Sample, replies: Mapping[str, Mapping[str, Any]]) -> RewardResult:
        scores, errors = {}, []
        for name, reply in replies.items():
            self._counts["calls"] += 1
            scores[name] = reply.get("score", 0.0)
            if "score" not in reply:
                [(fault, reason)] = reply.items()
                self._counts[fault] += 1
                errors.append(f"{name}: {fault}: {reason}")
        reward = sum(part.weight * scores[name] for name, part in self._parts.items())
        correct = all("score" in replies[name] and scores[name] >= self._full_marks for name in self._judging)
        if not abs(reward) < _LARGEST:
            self._counts["invalid"] += 1
            errors.append(f"invalid: the weighted sum of {scores} is too large")
            reward, correct = 0.0, False
        for error in errors:
            _log.warning("reward of %s: %s", sample.name or "a sample", error)
        found = (replies[name].get("extracted") for name in (*self._judging, *replies))
        return RewardResult(reward, "; ".join(errors) or None, next(filter(None, found), None), scores, correct)

    async def _submit(self, operation: str, name: str, content: Any) -> Reply:
        if self._closed:
            raise RewardError("the reward pool is closed")
        request = pickle.dumps((operation, name, content))
        return await asyncio.wrap_future(self._threads.submit(self._call, request, self._parts[name].timeout_s))

    def _call(self, request: bytes, timeout_s: float) -> Reply:
        """One request on a free process, in a thread. There are as many threads as slots, so one is always free."""
        process = self._slots.get()
        try:
            if process is None:
                process = self._start()
            reply = process.ask(request, timeout_s)
            if process.dead:
                self._forget(process)
                process = None
            if self._closed:
                raise RewardError("the reward pool was closed during a call")
            return reply
        finally:
            self._slots.put(process)

    def _start(self) -> GraderProcess:
        with self._lock:
            if self._closed:
                raise RewardError("the reward pool is closed")
            process = GraderProcess(self._local, max(self._parts[name].timeout_s for name in self._local))
            self._running.add(process)
        answer = process.start(_START_TIMEOUT_S)
        if "ready" in answer:
            self._warn(answer["ready"])
            return process
        process.kill()
        self._forget(process)
        raise RewardError(f"the reward cannot be started: {next(iter(answer.values()))}")

    def _warn(self, warnings: Sequence[str]) -> None:
        """Once, not for every process that is replaced."""
        with self._lock:
            warned, self._warned = self._warned, True
        for warning in () if warned else warnings:
            _log.warning(warning)

    def _forget(self, process: GraderProcess) -> None:
        with self._lock:
            self._running.discard(process)
        process.disconnect()
