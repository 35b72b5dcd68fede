"""What the servers of all engines have in common: a process that is asked over HTTP, from its start to its end.

One object is one server process. A subclass (`vllm.py`, `sglang.py`) adds the command, the environment, and the routes.
"""
from __future__ import annotations

import asyncio
import json
import os
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Mapping, Optional, Sequence

import aiohttp
import numpy as np

import mrl.receiver
from mrl.config.schema import Experiment
from mrl.engine.api import EngineClosed, EngineLost, EngineStartError, GenerateRequest, MemoryPart
from mrl.engine.experts import checked
from mrl.engine.ports import reserve_port
from mrl.engine.probe import look_into
from mrl.engine.process import ProcessTree
from mrl.reshard.fp8 import quantization_config
from mrl.reshard.spec import model_spec, read_config

RECEIVER_DIR = Path(mrl.receiver.__file__).parent
POLL_S = 0.2
SERVER_KEEP_ALIVE_S = 3600  # the server must never close a connection that we are about to use
CLIENT_KEEP_ALIVE_S = 60.0
# What torchrun and Ray leave in our environment must not reach an engine, which has a world of its own.
FOREIGN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def sleeps(experiment: Experiment, gpus: Sequence[int], load_weights: bool) -> bool:
    """Whether a server is one that gives its memory up at times. One that loads its own weights must keep them."""
    return not load_weights and experiment.engines_sleep("cuda" if gpus else "cpu")


class HttpServer(ABC):
    """One engine server. EngineServer is its only user.

    gpus: GPU indices on this machine, none for a CPU engine. load_weights: read the weights of model.path; without it
    the server starts with random ones and reads none from disk.
    """

    engine: ClassVar[str]
    """Its name in rollout.engine, which is also the name of its Python package."""
    answers_while_sampling: ClassVar[bool]
    """Whether call_workers comes back while requests are being sampled. Else it waits for them, and they for it."""

    def __init__(self, experiment: Experiment, index: int, run_id: str, incarnation: int, log_path: Path,
                 gpus: Sequence[int], load_weights: bool):
        self.experiment, self.index, self.run_id, self.incarnation = experiment, index, run_id, incarnation
        self.log_path, self.gpus, self.load_weights = log_path, tuple(gpus), load_weights
        self.sleeps = sleeps(experiment, self.gpus, load_weights)
        self.process: Optional[ProcessTree] = None
        self.session: Optional[aiohttp.ClientSession] = None
        self.url = ""
        replays = experiment.trainer.moe_routing == "replay"
        self.replayed = model_spec(read_config(self.model_path)) if replays else None  # whose routing is to be told

    # -- what each engine does in its own way

    @abstractmethod
    def command_line(self, port: int) -> list[str]:
        """The command. What rollout.args may not override is in `mrl.engine.flags.OWNED_FLAGS`."""

    @abstractmethod
    def variables(self) -> dict[str, str]:
        """Environment variables that this engine needs, PYTHONPATH for its own."""

    @abstractmethod
    async def sample(self, request: GenerateRequest) -> tuple[list[int], list[float], str, Optional[np.ndarray]]:
        """(token ids, log-probs, finish reason as the engine says it, experts [tokens, all layers, experts a token] if
        the engine was asked for them)."""

    @abstractmethod
    async def token_log_probs(self, token_ids: list[int]) -> list[Optional[float]]:
        """log p of each token given those before it, by the model itself: temperature 1, all tokens kept."""

    @abstractmethod
    async def call_workers(self, method: str, argument: Optional[str] = None, timeout_s: float = 60.0) -> list[dict]:
        """Call a method of `mrl_receiver.answers` on every worker; their answers, by rank."""

    @abstractmethod
    async def sleep(self, timeout_s: float) -> None:
        """Give up the memory of weights and cache, whose contents are lost. Only when awake, and idle."""

    @abstractmethod
    async def wake(self, part: MemoryPart, timeout_s: float) -> None:
        """Take that memory back at the same addresses: first of the weights, then of the cache."""

    @abstractmethod
    async def try_reset_prefix_cache(self, timeout_s: float) -> bool:
        """Whether every cached key and value could be forgotten."""

    # -- what they all do

    def config_changes(self) -> dict[str, Any]:
        """What of the model's config.json an engine must see otherwise. One that reads its weights takes them as they
        are."""
        if self.experiment.rollout.quantization is None or self.load_weights:
            return {}
        return {"quantization_config": quantization_config(model_spec(read_config(self.model_path)))}

    async def start(self) -> None:
        """Start the server and return when it answers, as the one we started. EngineStartError otherwise."""
        rollout = self.experiment.rollout
        found = await asyncio.to_thread(look_into, rollout.python, self.engine)
        if found.problem:
            raise EngineStartError(f"rollout.python={rollout.python!r}: {found.problem}")
        wanted = rollout.port + self.index if rollout.port else 0
        with reserve_port(rollout.host, wanted, "rollout.port") as port:
            self.url = f"http://{rollout.host}:{port}"
            self.process = ProcessTree(self.command_line(port) + list(rollout.args), self.log_path,
                                       cwd=self.log_path.parent, env=self.environment())
            self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=CLIENT_KEEP_ALIVE_S))
            await self._answers(time.monotonic() + rollout.start_timeout_s)
            await self._is_ours()

    async def generate(self, request: GenerateRequest) -> tuple[list[int], list[float], str, Optional[np.ndarray]]:
        """(token ids, log-probs, "stop" or "length", experts as in `Completion`). To abort, cancel.

        EngineLost when the server goes away, EngineClosed when it has aborted the request itself.
        """
        token_ids, log_probs, finish_reason, experts = await self.sample(request)
        if finish_reason == "abort":  # a whole answer otherwise, with the tokens there were
            raise EngineClosed(f"engine {self.index} (incarnation {self.incarnation}) aborted the request half way")
        if finish_reason not in ("stop", "length"):
            raise RuntimeError(f"engine {self.index} ended a completion with finish_reason {finish_reason!r}; known "
                               "are 'stop', 'length' and 'abort'")
        if len(token_ids) != len(log_probs):
            raise RuntimeError(f"engine {self.index} returned {len(token_ids)} tokens but {len(log_probs)} log-probs")
        if self.replayed:
            experts = checked(experts, len(request.prompt_ids) + len(token_ids), self.replayed, self.index)
        return token_ids, log_probs, finish_reason, experts

    async def score(self, token_ids: list[int]) -> list[float]:
        """`token_log_probs`, one for each token; 0 for the first. Raises as `generate`."""
        log_probs = await self.token_log_probs(token_ids)
        if len(log_probs) != len(token_ids) or None in log_probs[1:]:
            raise RuntimeError(f"engine {self.index} was given {len(token_ids)} tokens to score and returned "
                               f"{sum(value is not None for value in log_probs)} log-probs of {len(log_probs)}")
        return [0.0, *log_probs[1:]]

    async def reset_prefix_cache(self, timeout_s: float) -> None:
        """Forget every cached key and value. Retries while aborted requests still hold blocks. RuntimeError."""
        deadline = time.monotonic() + timeout_s
        while not await self.try_reset_prefix_cache(timeout_s):
            if time.monotonic() > deadline:
                raise RuntimeError(f"engine {self.index} could not reset its prefix cache within {timeout_s:.0f} s")
            await asyncio.sleep(POLL_S)

    def exit_code(self) -> Optional[int]:
        """None while the server runs."""
        return self.process.poll()

    def log_tail(self) -> str:
        """The end of what the server wrote."""
        return self.process.tail()

    async def stop(self) -> None:
        """End the server and everything it started."""
        if self.session is not None:
            await self.session.close()
        if self.process is not None:
            await asyncio.to_thread(self.process.stop)

    def environment(self) -> dict[str, str]:
        """The environment of the server: ours, what the engine needs, and rollout.env over both."""
        inherited = {key: value for key, value in os.environ.items()
                     if key not in FOREIGN_VARIABLES and not key.startswith("TORCHELASTIC_")}
        ours = {**self.variables(), "CUDA_VISIBLE_DEVICES": ",".join(map(str, self.gpus))}
        if Path(self.experiment.model.path).is_dir():
            ours |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        if self.sleeps:  # memory that can be given up is allocated otherwise
            ours |= {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}
        merged = {**inherited, **ours, **self.experiment.rollout.env}
        theirs = self.experiment.rollout.env.get("PYTHONPATH", inherited.get("PYTHONPATH"))
        merged["PYTHONPATH"] = os.pathsep.join(filter(None, [str(RECEIVER_DIR), ours.get("PYTHONPATH"), theirs]))
        return merged | {"MRL_RUN_ID": self.run_id, "MRL_ENGINE": str(self.index),
                         "MRL_INCARNATION": str(self.incarnation)}

    @property
    def model_path(self) -> str:
        """model.path, for a process with another working directory."""
        path = Path(self.experiment.model.path)
        return str(path.resolve()) if path.is_dir() else self.experiment.model.path

    async def post(self, route: str, body: Mapping[str, Any], timeout_s: Optional[float] = None) -> Any:
        """The server's JSON answer (None: an empty one). EngineLost when it goes away, RuntimeError when it refuses."""
        status, text = await self.request(route, body, timeout_s)
        if status != 200:
            raise RuntimeError(f"engine {self.index} answered {status} to {route}: {text[:500]}")
        return json.loads(text) if text else None

    async def request(self, route: str, body: Mapping[str, Any], timeout_s: Optional[float] = None) -> tuple[int, str]:
        """(HTTP status, text) of a POST. EngineLost when the server goes away."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self.session.post(self.url + route, json=body, timeout=timeout) as response:
                text = await response.text()
        except (aiohttp.ClientError, ConnectionError, RuntimeError) as error:  # RuntimeError: our session is closed
            raise EngineLost(f"engine {self.index} (incarnation {self.incarnation}) is gone: "
                             f"{type(error).__name__} {error}") from error
        if response.status >= 500 and (self.exit_code() is not None or not await self._healthy()):
            raise EngineLost(f"engine {self.index} (incarnation {self.incarnation}) is going down: {text[:300]}")
        return response.status, text

    async def _answers(self, deadline: float) -> None:
        while not await self._healthy():
            if self.exit_code() is not None:
                raise EngineStartError(f"engine {self.index} ended with exit code {self.exit_code()} while starting; "
                                       f"the end of {self.log_path}:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise EngineStartError(
                    f"engine {self.index} did not answer within rollout.start_timeout_s="
                    f"{self.experiment.rollout.start_timeout_s:.0f}; the end of {self.log_path}:\n{self.log_tail()}")
            await asyncio.sleep(POLL_S)

    async def _is_ours(self) -> None:
        mine = {"run_id": self.run_id, "engine": self.index, "incarnation": self.incarnation}
        for answer in await self.call_workers("mrl_identity"):
            if answer.get("error"):
                raise EngineStartError(f"engine {self.index} cannot be given weights: {answer['error']}")
            theirs = {key: answer.get(key) for key in mine}
            if theirs != mine:
                raise EngineStartError(f"another server answers at {self.url}: wanted {mine}, got {answer}; stop it, "
                                       f"or change rollout.port={self.experiment.rollout.port}")

    async def _healthy(self) -> bool:
        """Whether the server answers and its engine process lives. It must not be asked to generate for that."""
        try:
            async with self.session.get(self.url + "/health", timeout=aiohttp.ClientTimeout(total=5)) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False
