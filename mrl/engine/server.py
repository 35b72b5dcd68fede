"""The gate: the one way to an engine. It keeps its server alive (life.py), and serves only weights that it can name.

    starting ──► dirty ──receive──► serving        dirty: holds nothing that was pushed whole; every request is refused
        ▲          ▲  ◄──failure──    │            asleep: its memory is with the trainers, or only partly back
        └──restart─┴ dies or hangs ◄──┘            failed: rollout.max_restarts used up

An EngineServer is a plain asyncio class; mrl runs it as a Ray actor with high concurrency (`ray.remote(EngineServer)`).
"""
from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Coroutine, Optional, Sequence

from mrl.config.schema import Experiment
from mrl.engine.api import (Completion, EngineChanged, EngineClosed, EngineLost, GenerateRequest, Prepared,
                            SyncError, SyncResult, Version)
from mrl.engine.coverage import coverage_problems, summary
from mrl.engine.life import ServerLife
from mrl.receiver.mrl_receiver.wire import Plan, SyncRequest

RPC_MARGIN_S = 20.0
"""How long after a sync's deadline a worker may answer. It gives up at the deadline itself, so a later one hangs."""
DRAIN_SHARE = 0.4
"""Share of a sync's time that requests in flight may take to finish. Senders wait a little longer for an engine."""


class EngineServer(ServerLife):
    """One engine of the fleet, across restarts of its server.

    gpus: the server's GPU indices on this machine, none for a CPU engine. load_weights: it reads the weights of
    model.path and serves them at once as LOADED_VERSION, instead of waiting to be given some. make_server: None means
    that of rollout.engine. The server's log is run_dir/logs/engine_<index>.log.
    """

    def __init__(self, experiment: Experiment, index: int, run_id: str, run_dir: Path | str, gpus: Sequence[int] = (),
                 load_weights: bool = False, make_server: Optional[Callable[..., Any]] = None):
        super().__init__(experiment, index, run_id, run_dir, gpus, load_weights, make_server)
        self._floor = Version(0, 0)  # the newest version ever accepted; older ones are refused
        self._queued, self._aborts = 0, 0  # requests that wait for a slot; calls of abort() so far
        self._slots = asyncio.Semaphore(experiment.rollout.max_concurrent_requests)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one sequence with the weights being served.

        EngineClosed when the gate is closed, serves weights older than request.at_least, or the request is aborted;
        EngineLost when the engine dies or does not answer within rollout.request_timeout_s, upon which it is
        restarted; RuntimeError when it rejects the request.
        """
        version, answer = await self._serve(
            request.max_tokens, request.at_least, lambda server: server.generate(request))
        token_ids, log_probs, finish_reason, experts = answer
        return Completion(token_ids, log_probs, finish_reason, version, experts)

    async def score(self, token_ids: list[int]) -> list[float]:
        """log p of each token given those before it, with the weights being served; 0 for the first.

        Of the model's own distribution: temperature 1, all tokens kept. Raises as `generate`.
        """
        _, log_probs = await self._serve(len(token_ids), None, lambda server: server.score(token_ids))
        return log_probs

    async def prepare(self, request: SyncRequest) -> Prepared:
        """Take on the plan of a new link: the workers trace it while the engine serves (where it can), and prove its
        shards if it has any; that overwrites the weights, so the gate closes for it and the engine waits for others.

        SyncError: refused, and the engine goes on as before; or the proof broke off. EngineLost: it died.
        """
        async with self._sync_lock:
            version, deadline = Version(*request.version), time.monotonic() + request.deadline_s
            self._admit(request, version)
            try:
                if self._server.answers_while_sampling:
                    prepared, proven = await self._trace(request, deadline)
                else:
                    prepared, proven = await self._trace_between_requests(request, version, deadline)
                if prepared.not_sharded or proven:
                    return prepared
                await self._close_and_drain(request, version)
                self._version = None
                return _prepared(await self._workers("mrl_prove", replace(request, plan={}), deadline))
            except Exception as error:
                if self._state == "dirty":
                    self._why_closed = f"version {version} was refused: {error}"
                raise _sync_error(error)

    async def receive(self, request: SyncRequest) -> SyncResult:
        """Take part in one whole weight sync: close the gate, drain, receive, verify, open it at the new version.

        SyncError: refused, and the engine goes on as before; or broken off, and it is dirty. EngineLost: it died.
        """
        async with self._sync_lock:
            version, deadline = Version(*request.version), time.monotonic() + request.deadline_s
            self._admit(request, version)
            if self._plan is None:
                raise SyncError(f"engine {self._index} has been given no plan")
            drained = await self._close_and_drain(request, version)
            self._version, self._floor = None, version
            try:
                result = await self._transfer(request, drained, deadline)
            except Exception as error:
                if self._state == "dirty":  # else it is being restarted, which says more
                    self._why_closed = f"version {version} was not received whole: {error}"
                raise _sync_error(error)
            if self._incarnation != request.incarnation or self._state != "dirty":
                raise EngineLost(f"engine {self._index} died at the end of the sync of version {version}")
            self._version = version
            self._state, self._why_closed = ("serving", "") if self._held == "all" else ("asleep", "its cache sleeps")
            return result

    async def abort(self, attempt: int) -> int:
        """Abort every request, in flight or waiting for a slot; refuse weights of attempts before `attempt`.

        Returns the number of requests aborted; each raises EngineClosed.
        """
        self._floor = max(self._floor, Version(attempt, 0))
        self._aborts += 1  # those that wait see it when their turn comes
        for task in self._in_flight:
            task.cancel()
        return len(self._in_flight) + self._queued

    # -- generation

    async def _serve(self, cost: int, at_least: Optional[Version],
                     ask: Callable[[Any], Coroutine]) -> tuple[Version, Any]:
        """What the server answers to `ask(server)`, and the version that answered. `cost`: tokens, for the router."""
        self._require_open(at_least)
        self._outstanding += cost
        try:
            await self._take_slot()
            try:
                self._require_open(at_least)  # much may have happened while we waited
                return await self._ask(ask)
            finally:
                self._slots.release()
        finally:
            self._outstanding -= cost

    async def _take_slot(self) -> None:
        """Wait for one of rollout.max_concurrent_requests slots. EngineClosed when abort() was called meanwhile."""
        aborts = self._aborts
        self._queued += 1
        try:
            await self._slots.acquire()
        finally:
            self._queued -= 1
        if self._aborts != aborts:
            self._slots.release()
            raise EngineClosed(f"engine {self._index}: the request was aborted before it began")

    def _require_open(self, at_least: Optional[Version]) -> None:
        if self._state == "failed":
            raise EngineLost(f"engine {self._index} is given up: {self._error}")
        if self._state != "serving":
            raise EngineClosed(f"engine {self._index} (incarnation {self._incarnation}) is {self._state}: "
                               f"{self._why_closed}")
        if at_least is not None and self._version < at_least:
            raise EngineClosed(f"engine {self._index} serves version {self._version}, and {at_least} is wanted")

    async def _ask(self, ask: Callable[[Any], Coroutine]) -> tuple[Version, Any]:
        version, incarnation = self._version, self._incarnation
        timeout_s = self._experiment.rollout.request_timeout_s
        task = asyncio.create_task(ask(self._server))
        self._in_flight.add(task)
        try:
            await asyncio.wait({task}, timeout=timeout_s)
            if not task.done():
                raise self._lose(f"engine {self._index} did not answer a request within rollout.request_timeout_s="
                                 f"{timeout_s:g}", incarnation)
            if task.cancelled():
                raise EngineClosed(f"engine {self._index}: the request was aborted half way")
            answer = self._unless_lost(task.result, incarnation)
            if (self._version, self._incarnation) != (version, incarnation):
                raise EngineLost(f"engine {self._index} went from version {version} to {self._version} while sampling")
            return version, answer
        finally:
            self._in_flight.discard(task)
            task.cancel()

    # -- syncs

    def _admit(self, request: SyncRequest, version: Version) -> None:
        if request.run_id != self._run_id or request.engine != self._index:
            raise SyncError(f"this is engine {self._index} of run {self._run_id!r}, not engine {request.engine} of "
                            f"run {request.run_id!r}")
        if self._state in ("starting", "failed") or request.incarnation != self._incarnation:
            raise EngineChanged(f"engine {self._index} is {self._state}, incarnation {self._incarnation}; the sync is "
                                f"for incarnation {request.incarnation}")
        if self._held == "nothing":
            raise SyncError(f"engine {self._index} is asleep: its weights have no memory, and must be woken first")
        if version < self._floor or version == self._version:
            held = f"serves {self._version}" if self._version else f"was promised {self._floor}"
            raise SyncError(f"version {version} is refused: engine {self._index} {held} and takes only newer ones")

    async def _close_and_drain(self, request: SyncRequest, version: Version) -> float:
        """Close the gate and let requests in flight finish. Returns the seconds it took. SyncError: as before."""
        opened, self._state = self._state, "dirty"
        self._why_closed = f"it is receiving version {version}"
        began = time.monotonic()
        try:
            await self._drain(began + DRAIN_SHARE * request.deadline_s, "raise sync.timeout_s")
        except Exception as error:
            if self._incarnation == request.incarnation and self._state == "dirty":
                self._state, self._why_closed = opened, f"version {version} was refused: {error}"
            raise _sync_error(error)
        return time.monotonic() - began

    async def _trace(self, request: SyncRequest, deadline: float) -> tuple[Prepared, bool]:
        """Let the workers trace the plan, and check that they will take all of it. The second: nothing is to prove."""
        try:
            plan = Plan.from_wire(request.plan, worker=0)  # every worker reads its own share
        except (LookupError, TypeError, ValueError) as error:
            raise SyncError(f"the plan is malformed: {type(error).__name__} {error}") from error
        replies = await self._workers("mrl_prepare", request, deadline)
        if problems := coverage_problems(plan.tensors, replies, None):
            raise SyncError(summary(problems))
        self._plan = plan
        return _prepared(replies), all(reply["proven"] for reply in replies)

    async def _trace_between_requests(self, request: SyncRequest, version: Version, deadline: float
                                      ) -> tuple[Prepared, bool]:
        """_trace behind a closed gate, which is then as it was: nothing of the weights has changed."""
        before = self._state, self._why_closed
        await self._close_and_drain(request, version)
        try:
            return await self._trace(request, deadline)
        finally:
            if self._incarnation == request.incarnation and self._state == "dirty":
                self._state, self._why_closed = before

    async def _transfer(self, request: SyncRequest, drained: float, deadline: float) -> SyncResult:
        # Nothing is sampled behind the closed gate, so that the cache may be emptied at any time before it opens; asked
        # for now, that costs no time of its own.
        emptied = asyncio.create_task(self._server.reset_prefix_cache(deadline - time.monotonic() + RPC_MARGIN_S))
        try:
            replies = await self._workers("mrl_receive", replace(request, plan={}), deadline)
            await emptied
        except BaseException:
            emptied.cancel()
            raise
        unverified: tuple[str, ...] = ()
        if request.verify:
            if problems := coverage_problems(self._plan.tensors, replies, replies[0]["expected"]):
                raise SyncError(f"verification failed: {summary(problems)}")
            unverified = tuple(sorted({name for reply in replies for name in reply["opaque"]}))
        slowest = {key: max(reply[key] for reply in replies) for key in ("receive_s", "apply_s", "transfer_s")}
        return SyncResult(verified=request.verify, drain_s=drained, unverified=unverified, **slowest)

    async def _workers(self, method: str, request: SyncRequest, deadline: float) -> list[dict]:
        left = max(0.1, deadline - time.monotonic())
        call = asyncio.create_task(self._server.call_workers(
            method, replace(request, deadline_s=left).to_json(), left + RPC_MARGIN_S))
        await asyncio.wait({call})
        try:
            replies = self._unless_lost(call.result, request.incarnation)
        except TimeoutError as error:
            raise self._lose(f"engine {self._index}'s workers did not answer {method} by the sync's deadline",
                             request.incarnation) from error
        if errors := [f"worker {rank}: {reply['error']}" for rank, reply in enumerate(replies) if reply["error"]]:
            raise SyncError("; ".join(errors))
        return replies


def _prepared(replies: list[dict]) -> Prepared:
    """What all workers say of the shards."""
    return Prepared({name: why for reply in replies for name, why in reply["not_sharded"].items()})


def _sync_error(error: Exception) -> Exception:
    """What a caller of receive() gets to see."""
    if isinstance(error, (SyncError, EngineLost)):
        return error
    return SyncError(f"{type(error).__name__}: {error}")
