"""A bare client of an engine's own HTTP API, as its users write it, for bench_rollout.py to measure mrl against."""
from __future__ import annotations

import asyncio
from typing import Any, Sequence

import aiohttp

from mrl.engine.api import GenerateRequest

ROUTES = {"vllm": "/v1/completions", "sglang": "/generate"}


def body(engine: str, model: str, request: GenerateRequest, log_probs: bool) -> dict[str, Any]:
    """What the engine's API wants to hear of `request`. log_probs: also ask for those of the sampled tokens."""
    common = {"temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k}
    if engine == "vllm":
        asked = {"logprobs": 0, "return_token_ids": True} if log_probs else {}
        return {"model": model, "prompt": request.prompt_ids, "max_tokens": request.max_tokens, "seed": request.seed,
                **common, **asked}
    return {"input_ids": request.prompt_ids, "return_logprob": log_probs, "sampling_params": {
        "max_new_tokens": request.max_tokens, "sampling_seed": request.seed, **common}}


def sampled_tokens(engine: str, answer: dict[str, Any]) -> int:
    """How many the engine says that it has sampled."""
    return answer["usage"]["completion_tokens"] if engine == "vllm" else answer["meta_info"]["completion_tokens"]


async def ask_all(url: str, engine: str, model: str, requests: Sequence[GenerateRequest], at_once: int,
                  log_probs: bool) -> int:
    """Tokens sampled for all requests, of which `at_once` are under way at a time."""
    slots = asyncio.Semaphore(at_once)
    unlimited = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=unlimited, timeout=aiohttp.ClientTimeout(total=None)) as session:
        async def ask(request: GenerateRequest) -> int:
            asked = body(engine, model, request, log_probs)
            async with slots, session.post(url + ROUTES[engine], json=asked) as answer:
                answer.raise_for_status()
                return sampled_tokens(engine, await answer.json())

        return sum(await asyncio.gather(*map(ask, requests)))
