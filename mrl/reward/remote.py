"""Parts of the reward that a server scores: the HTTP client, its retries and time-outs, and what counts as a fault.

They run in the rollout worker's event loop, since waiting for a server needs no process that can be killed. How each
kind asks and reads the answer is in `http.py` and `model.py`.
"""
from __future__ import annotations

import asyncio
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import aiohttp

from mrl.config.rewards import Part, Server
from mrl.reward.api import RewardError, Sample

Reply = dict[str, Any]
"""{"score": float, "extracted": None}, or {fault: reason}."""


class ServerFault(Exception):
    """A request that gave no usable answer. `fault`: timeout, error, or invalid."""

    def __init__(self, fault: str, reason: str):
        super().__init__(reason)
        self.fault = fault


class RemotePart(ABC):
    """One part that asks a server; the kinds say how."""

    def __init__(self, name: str, part: Server):
        self._name, self._part = name, part
        self._slots = asyncio.Semaphore(part.max_concurrent)
        self._headers = {}
        if part.api_key_env is not None:
            if not (key := os.environ.get(part.api_key_env)):
                raise RewardError(f"reward.parts.{name}.api_key_env is {part.api_key_env}, which is not set in the "
                                  "rollout workers: export it before mrl starts")
            self._headers["Authorization"] = f"Bearer {key}"

    async def probe(self) -> None:
        """Raise RewardError unless something answers HTTP at the address."""
        try:
            async with self._session() as session, session.get(self._part.url) as answer:
                await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RewardError(f"reward.parts.{self._name}.url {self._part.url} does not answer "
                              f"({type(error).__name__}: {error}): start the server first, or correct it") from error

    @abstractmethod
    async def grade(self, samples: Sequence[Sample]) -> list[Reply]:
        """One reply for each of the responses to one prompt."""

    async def _one_by_one(self, samples: Sequence[Sample],
                          score: Callable[[aiohttp.ClientSession, Sample], Awaitable[Any]]) -> list[Reply]:
        """`score(session, sample) -> number` of all samples at once; a fault is that sample's alone."""
        async def reply(session: aiohttp.ClientSession, sample: Sample) -> Reply:
            try:
                return {"score": finite(await score(session, sample)), "extracted": None}
            except ServerFault as fault:
                return {fault.fault: str(fault)}
            except Exception as error:  # a chat template that refuses the conversation, for one
                return {"error": f"{type(error).__name__}: {error}"}

        async with self._session() as session:
            return await asyncio.gather(*(reply(session, sample) for sample in samples))

    async def _post(self, session: aiohttp.ClientSession, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON answer to one request, tried `retries` times more.

        Raises ServerFault: out of tries, refused (a 4xx other than 408 and 429 is not tried again), or no JSON.
        """
        wait_s, url = self._part.backoff_s, self._part.url.rstrip("/") + path if path else self._part.url
        for tries_left in range(self._part.retries, -1, -1):
            try:
                async with self._slots, session.post(url, json=body) as answer:
                    text = await answer.text(errors="replace")
                if answer.status < 300:
                    return json.loads(text)
                fault = ServerFault("error", f"the server answered {answer.status}: {text[:300]}")
                if answer.status < 500 and answer.status not in (408, 429):
                    raise fault
            except TimeoutError:
                fault = ServerFault("timeout", f"no answer within {self._part.timeout_s} s")
            except aiohttp.ClientError as error:
                fault = ServerFault("error", f"{type(error).__name__}: {error}")
            except json.JSONDecodeError:
                raise ServerFault("invalid", f"the server's answer is not JSON: {text[:300]}") from None
            if tries_left:
                await asyncio.sleep(wait_s)
                wait_s *= 2
        raise fault

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._part.timeout_s), headers=self._headers)


def make_remote(name: str, part: Part) -> RemotePart:
    """The client of a part that is remote."""
    if part.kind == "http":
        from mrl.reward.http import HttpPart
        return HttpPart(name, part)
    from mrl.reward.model import ModelPart
    return ModelPart(name, part)


def finite(value: Any) -> float:
    """Raises ServerFault unless the value is a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ServerFault("invalid", f"the server gave {value!r:.200} where a finite number belongs")
    return float(value)
