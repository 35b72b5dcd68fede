"""Spreads requests over the engines: least outstanding tokens first, and again elsewhere when an engine is lost."""
from __future__ import annotations

import asyncio
import time
from typing import Any, Awaitable, Callable, NamedTuple

import ray
from ray.exceptions import RayActorError

from mrl.engine.api import Completion, EngineClosed, EngineLost, GenerateRequest


class Routed(NamedTuple):
    """A completion, and how many times an engine was lost while it was being sampled."""

    completion: Completion
    losses: int


class Router:
    """Sends each request to the engine that has the fewest tokens still to produce.

    engines: handles of EngineServer actors. A closed or lost engine is left alone for `retry_s` seconds; a request
    waits, however many engines come and go, until `deadline_s` has passed.
    """

    def __init__(self, engines: list, deadline_s: float, retry_s: float = 0.2):
        self.engines = engines
        self.deadline_s = deadline_s
        self.retry_s = retry_s
        self.outstanding = [0] * len(engines)
        self.resting_until = [0.0] * len(engines)

    async def generate(self, request: GenerateRequest) -> Routed:
        """The completion of `request`. Raises TimeoutError when no engine has answered by the deadline.

        Cancelling it aborts the request in the engine.
        """
        return Routed(*await self._ask(len(request.prompt_ids) + request.max_tokens,
                                       lambda engine: engine.generate.remote(request)))

    async def score(self, token_ids: list[int]) -> list[float]:
        """log p of each token given those before it, 0 for the first. Raises as `generate`."""
        log_probs, _ = await self._ask(len(token_ids), lambda engine: engine.score.remote(token_ids))
        return log_probs

    async def _ask(self, cost: int, ask: Callable[[Any], Awaitable]) -> tuple[Any, int]:
        """What an engine answers, and how many times one was lost meanwhile. `cost`: tokens to be worked on."""
        deadline, losses = time.monotonic() + self.deadline_s, 0
        while (now := time.monotonic()) < deadline:
            ready = [i for i in range(len(self.engines)) if self.resting_until[i] <= now]
            if not ready:
                await asyncio.sleep(self.retry_s / 2)
                continue
            index = min(ready, key=self.outstanding.__getitem__)
            self.outstanding[index] += cost
            call = ask(self.engines[index])
            try:
                return await call, losses
            except asyncio.CancelledError:
                ray.cancel(call)  # else the engine would sample on, for nobody, and the next sync wait for it
                raise
            except EngineClosed:
                self.resting_until[index] = time.monotonic() + self.retry_s
            except (EngineLost, RayActorError):
                losses += 1
                self.resting_until[index] = time.monotonic() + self.retry_s
            finally:
                self.outstanding[index] -= cost
        raise TimeoutError(
            f"no engine answered a request within loop.collect_timeout_s={self.deadline_s:.0f}: see logs/engine_*.log")
