"""Everything that is particular to SGLang: how a server is started, asked and told.

Tested with 0.5.17 and 0.5.23. Tokens go in and come out through /generate, without a tokenizer in the server. Its
workers are reached through a plugin (`mrl_receiver.sglang`), so that SGLang's own routes for weights, which differ from
release to release, are not used.
"""
from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Optional

import numpy as np

from mrl.engine.api import GenerateRequest, MemoryPart
from mrl.engine.experts import from_int32
from mrl.engine.http import SERVER_KEEP_ALIVE_S, HttpServer
from mrl.receiver.mrl_receiver.sglang import LOAD_FORMAT

CPU_DIR = Path(__file__).with_name("sglang_cpu")
CPU_CACHED_TOKENS = 32768


class SglangServer(HttpServer):
    """One SGLang server process."""

    engine = "sglang"
    answers_while_sampling = False

    def command_line(self, port: int) -> list[str]:
        rollout = self.experiment.rollout
        start = ["-m", "sglang.launch_server"] if self.gpus else [str(CPU_DIR / "sglang_cpu_server.py")]
        command = [
            rollout.python, *start, "--model-path", self.model_path, "--skip-tokenizer-init",
            "--host", rollout.host, "--port", str(port), "--log-level-http", "warning",
            "--load-format", "auto" if self.load_weights else "dummy", "--dtype", self.experiment.model.dtype,
            "--random-seed", str(self.experiment.seed % 2**31 + self.index),
            "--context-length", str(self.experiment.engine_tokens),
            "--max-running-requests", str(rollout.max_concurrent_requests),
            "--tp-size", str(rollout.parallel.tp), "--ep-size", str(rollout.parallel.ep), "--grammar-backend", "none",
            "--sampling-backend", "pytorch",  # the one that takes a seed for each request
        ]
        if self.replayed:
            command.append("--enable-return-routed-experts")
        if rollout.parallel.dp > 1:
            command += ["--dp-size", str(rollout.parallel.dp), "--enable-dp-attention"]
        if changes := self.config_changes():
            command += ["--json-model-override-args", json.dumps(changes)]
        if self.sleeps:
            command.append("--enable-memory-saver")
        if self.gpus:
            return [*command, "--attention-backend", "triton"]  # needs no package beside SGLang
        longest = self.experiment.engine_tokens
        cached = max(longest, min(CPU_CACHED_TOKENS, longest * rollout.max_concurrent_requests))
        return [*command, "--device", "cpu", "--attention-backend", "torch_native", "--max-total-tokens", str(cached),
                "--disable-cuda-graph", "--disable-overlap-schedule", "--skip-server-warmup",
                "--sleep-on-idle"]  # an idle scheduler would keep a core busy

    def variables(self) -> dict[str, str]:
        common = {
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",  # /health would wait behind a sync otherwise
            "SGLANG_TIMEOUT_KEEP_ALIVE": str(SERVER_KEEP_ALIVE_S),
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "false",  # log-probs with the temperature applied
        }
        if self.gpus:
            return common | {"NCCL_CUMEM_ENABLE": "0"}  # as SGLang has it; the trainers must do the same
        return common | {
            "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(CPU_DIR),
            # It wants to know the cores of each worker, and binds to none of them for lack of its own kernels.
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join("0" * self.experiment.rollout.parallel.tp),
        }

    async def sample(self, request: GenerateRequest) -> tuple[list[int], list[float], str, Optional[np.ndarray]]:
        sampling = {
            "max_new_tokens": request.max_tokens, "temperature": request.temperature, "top_p": request.top_p,
            "top_k": request.top_k, "stop_token_ids": list(request.stop_token_ids), "sampling_seed": request.seed,
            # The model's generation_config.json would otherwise change the distribution behind our back.
            "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        }
        answer = await self.post("/generate", {
            "input_ids": request.prompt_ids, "return_logprob": True, "sampling_params": sampling,
            **({"return_routed_experts": True} if self.replayed else {})})
        about = answer["meta_info"]
        log_probs = [log_prob for log_prob, _, _ in about["output_token_logprobs"]]
        experts = about.get("routed_experts")
        return (answer["output_ids"], log_probs, about["finish_reason"]["type"],
                experts and from_int32(experts, self.replayed))

    async def token_log_probs(self, token_ids: list[int]) -> list[Optional[float]]:
        answer = await self.post("/generate", {
            "input_ids": token_ids, "return_logprob": True, "logprob_start_len": 0,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0}})
        return [log_prob for log_prob, _, _ in answer["meta_info"]["input_token_logprobs"]]

    async def call_workers(self, method: str, argument: Optional[str] = None, timeout_s: float = 60.0) -> list[dict]:
        call = base64.b64encode(json.dumps({"method": method, "argument": argument}).encode()).decode()
        answer = await self.post("/update_weights_from_tensor", {
            "load_format": LOAD_FORMAT, "serialized_named_tensors": [call], "flush_cache": False}, timeout_s)
        # With attention data parallelism, one replica's message comes after the other; each has all workers' answers.
        return json.JSONDecoder().raw_decode(answer["message"])[0]

    async def sleep(self, timeout_s: float) -> None:
        await self.post("/release_memory_occupation", {"tags": ["weights", "kv_cache"]}, timeout_s)

    async def wake(self, part: MemoryPart, timeout_s: float) -> None:
        await self.post("/resume_memory_occupation", {"tags": [part]}, timeout_s)

    async def try_reset_prefix_cache(self, timeout_s: float) -> bool:
        status, _ = await self.request("/flush_cache", {}, timeout_s)
        return status == 200  # 400 while a request is alive
