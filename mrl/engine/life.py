"""The life of an engine's server: started, watched, restarted, put to sleep and woken, ended.

An engine that sleeps shares its GPUs with trainers. Its server is started where nobody else needs the memory, and goes
to sleep at once; from then on the trainers' rank 0 says whose turn it is:

    memory held    all ──sleep──► nothing ──wake("weights")──► weights ──wake("kv_cache")──► all
    state          serving        asleep                       asleep, pushed to             serving

One that dies stays down until it may hold all memory, and then begins at the left.
"""
from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any, Callable, Coroutine, Literal, Optional, Sequence

from mrl.config.schema import Experiment
from mrl.engine.api import EngineLost, EngineStatus, MemoryPart, SyncError, Version
from mrl.engine.engines import SERVERS
from mrl.engine.http import sleeps
from mrl.receiver.mrl_receiver.wire import Plan

logger = logging.getLogger(__name__)

LOADED_VERSION = Version(0, 0)
SUPERVISE_POLL_S = 0.2
FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0
"""Pause before an engine's first restart, doubled before each further one up to the most."""
MEMORY_TIMEOUT_S = 60.0
"""How long a server may take to give up memory, or to take it back."""
UP = ("asleep", "dirty", "serving")
"""States in which there is a server that answers."""


class ServerLife:
    """What EngineServer, the gate, is built on; its arguments are explained there."""

    def __init__(self, experiment: Experiment, index: int, run_id: str, run_dir: Path | str, gpus: Sequence[int],
                 load_weights: bool, make_server: Optional[Callable[..., Any]]):
        self._experiment, self._index, self._run_id = experiment, index, run_id
        self._log_path = Path(run_dir).resolve() / "logs" / f"engine_{index}.log"
        self._gpus, self._load_weights = tuple(gpus), load_weights
        self._make_server = make_server or SERVERS[experiment.rollout.engine]
        self._state, self._error = "starting", None
        self._why_closed = "it has not been started"
        self._incarnation, self._restarts = 0, 0
        self._version: Optional[Version] = None  # what it serves, or will with its cache back
        self._plan: Optional[Plan] = None
        self._server: Any = None
        self._supervisor: Optional[asyncio.Task] = None
        self._gone: Optional[str] = None  # how the server was found lost; the supervisor has not dealt with it yet
        self._in_flight: set[asyncio.Task] = set()
        self._outstanding = 0
        self._sync_lock = asyncio.Lock()
        self._sleeps = sleeps(experiment, self._gpus, load_weights)
        self._held: Literal["nothing", "weights", "all"] = "nothing"
        self._may_hold_all = asyncio.Event()
        self._may_hold_all.set()

    async def start(self) -> EngineStatus:
        """Start the server and wait until it answers, and sleeps if it is one that does. EngineStartError."""
        try:
            await self._launch()
        except BaseException as error:
            self._fail(str(error))
            raise
        if self._sleeps:
            self._may_hold_all.clear()
        self._supervisor = asyncio.create_task(self._supervise())
        return await self.status()

    async def status(self) -> EngineStatus:
        return EngineStatus(self._index, self._incarnation, self._state, self._version, self._outstanding, self._error,
                            self._experiment.rollout.parallel.tp)

    async def stop(self) -> None:
        """End the server and everything it started."""
        self._fail("it was stopped")
        if self._supervisor is not None:
            self._supervisor.cancel()
        if self._server is not None:
            await self._server.stop()

    # -- memory

    async def sleep(self) -> None:
        """Close the gate, abort what is in flight, and return when no memory is held: by a server that sleeps, or that
        has been ended because it would not. Waits for one that is starting. No-op when it sleeps."""
        self._may_hold_all.clear()
        async with self._sync_lock:
            if self._state in UP and self._held != "nothing":
                self._state, self._version = "asleep", None
                self._why_closed = "the trainers are using its memory"
                for task in self._in_flight:
                    task.cancel()
                await self._change_memory(self._fall_asleep(awake=self._held == "all"), "nothing")
        while self._held != "nothing":
            await asyncio.sleep(SUPERVISE_POLL_S)

    async def wake(self, part: MemoryPart) -> None:
        """Take memory back. "weights": there must be a push then. "kv_cache": the gate opens if there was, and a server
        that has died may be restarted. One that is not up, or cannot take it, is left to its supervisor."""
        before, after = {"weights": ("nothing", "weights"), "kv_cache": ("weights", "all")}[part]
        async with self._sync_lock:
            if self._state in UP and self._held == before:
                await self._change_memory(self._server.wake(part, MEMORY_TIMEOUT_S), after)
            if part == "kv_cache":
                self._may_hold_all.set()
                if self._state == "asleep" and self._held == "all":
                    self._state = "serving" if self._version else "dirty"
                    self._why_closed = "it has not received any weights since it slept"

    async def _fall_asleep(self, awake: bool = True) -> None:
        """With the gate closed. A server that still samples for a request that was aborted is waited for."""
        if not awake:  # vLLM takes one without a cache for one that sleeps already
            await self._server.wake("kv_cache", MEMORY_TIMEOUT_S)
        await self._drain(time.monotonic() + MEMORY_TIMEOUT_S, "the server does not end what was aborted; see its log")
        await self._server.call_workers("mrl_forget", timeout_s=MEMORY_TIMEOUT_S)
        await self._server.reset_prefix_cache(MEMORY_TIMEOUT_S)
        await self._server.sleep(MEMORY_TIMEOUT_S)

    async def _change_memory(self, change: Coroutine, held: Literal["nothing", "weights", "all"]) -> None:
        """`held` is what the server holds after `change`; one that fails in it is lost."""
        incarnation = self._incarnation
        try:
            await change
        except Exception as error:
            self._lose(f"engine {self._index} could not give up memory or take it back: {type(error).__name__} "
                       f"{error}", incarnation)
        if incarnation == self._incarnation and self._state in UP:
            self._held = held

    async def _drain(self, deadline: float, remedy: str) -> None:
        while self._in_flight:
            if (left := deadline - time.monotonic()) <= 0:
                raise SyncError(f"{len(self._in_flight)} requests were still in flight when they could be waited for no "
                                f"longer: {remedy}")
            await asyncio.wait(set(self._in_flight), timeout=left)
            await asyncio.sleep(0)  # let their callers take the answers

    # -- up and down

    async def _launch(self) -> None:
        self._incarnation += 1
        self._state, self._version, self._plan, self._held = "starting", None, None, "all"
        self._why_closed, self._gone = "its server is starting", None
        self._server = self._make_server(self._experiment, self._index, self._run_id, self._incarnation,
                                         self._log_path, self._gpus, self._load_weights)
        try:
            await self._server.start()
            if self._sleeps:
                await self._fall_asleep()
        except BaseException:
            await self._server.stop()
            self._held = "nothing"
            raise
        if self._load_weights:
            self._version, self._state = LOADED_VERSION, "serving"
        elif self._sleeps:
            self._state, self._held, self._why_closed = "asleep", "nothing", "it sleeps since its start"
        else:
            self._state, self._why_closed = "dirty", "it has not received any weights since its start"

    async def _supervise(self) -> None:
        """Restart the server whenever it ends or is found lost, rollout.max_restarts times in all."""
        limit = self._experiment.rollout.max_restarts
        while True:
            while self._server.exit_code() is None and self._gone is None:
                await asyncio.sleep(SUPERVISE_POLL_S)
            why = self._gone or f"engine {self._index} (incarnation {self._incarnation}) has died"
            self._state, self._version, self._why_closed = "starting", None, why
            try:
                await self._server.stop()
                error = (f"{why}; its server ended with exit code {self._server.exit_code()}; the end of "
                         f"{self._log_path}:\n{self._server.log_tail()}")
            except Exception as failure:
                error = f"{why}; and its end could not be followed: {type(failure).__name__} {failure}"
            self._held = "nothing"
            while True:
                logger.error("%s", error)
                if self._restarts >= limit:
                    return self._fail(f"rollout.max_restarts={limit} used up; {error}")
                await asyncio.sleep(min(FIRST_BACKOFF_S * 2 ** self._restarts, MAX_BACKOFF_S))
                while not self._may_hold_all.is_set():  # it may have been taken back when wait() returns
                    await self._may_hold_all.wait()
                self._restarts += 1
                try:
                    await self._launch()
                    break
                except Exception as failure:
                    error = str(failure) or type(failure).__name__

    def _lose(self, why: str, incarnation: int) -> EngineLost:
        """Close the gate, and have the supervisor end and restart this server. The error to raise."""
        if incarnation == self._incarnation and self._state in UP:
            self._gone, self._state, self._version, self._why_closed = why, "starting", None, why
        return EngineLost(why)

    def _unless_lost(self, result: Callable[[], Any], incarnation: int) -> Any:
        """result(), and if it says that this server went away, close the gate at once: a death takes time to show."""
        try:
            return result()
        except EngineLost as error:
            self._lose(str(error), incarnation)
            raise

    def _fail(self, error: str) -> None:
        self._state, self._version, self._error, self._why_closed = "failed", None, error, error
        self._held = "nothing"
