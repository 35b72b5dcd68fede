"""The step's timings, on the trainer's clock."""
from __future__ import annotations

import time
from contextlib import contextmanager
from typing import Callable, Iterator


class Clock:
    """Adds up seconds by name. Every moment counts for one name: a timing inside another suspends the outer one.

    `lap` closes a step, so that step = every named part + other, exactly.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self.seconds: dict[str, float] = {}
        self.running: list[str] = []
        self.began = self.mark = now()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._charge()
        self.running.append(name)
        try:
            yield
        finally:
            self._charge()
            self.running.pop()

    def lap(self) -> dict[str, float]:
        """Seconds since the last lap: of each part, of `step` (all of it) and of `other` (what no part covers)."""
        self._charge()
        step, parts = self.mark - self.began, self.seconds
        self.began, self.seconds = self.mark, {}
        return {**parts, "step": step, "other": step - sum(parts.values())}

    def _charge(self) -> None:
        now = self.now()
        if self.running:
            name = self.running[-1]
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self.mark
        self.mark = now
