"""Times sampling from one engine as mrl does it, and beside it, in the same run, as a bare client does.

    python tools/bench_rollout.py --python ENGINE_PYTHON --shape qwen2.5-1.5b [--json FILE]

The same engine process, the same requests: prompts of random tokens, responses of long-tailed lengths, all asked for at
once. The ways take turns: mrl's router and gate (a Ray actor), as a rollout worker asks; an aiohttp client that asks
the engine's own API for the same, log-probs included; and that client asking for text alone, as the engines' own
benchmarks do. Tokens are those sampled, by the engine's count.
"""
from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Awaitable, Callable, Optional, Sequence

import ray
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from mrl.config.schema import Experiment  # noqa: E402
from mrl.engine.api import GenerateRequest  # noqa: E402
from mrl.engine.ports import reserve_port  # noqa: E402
from mrl.engine.vllm import MODEL_NAME  # noqa: E402
from mrl.reshard.spec import model_spec, read_config  # noqa: E402
from mrl.rollout.router import Router  # noqa: E402
from tools import one_engine  # noqa: E402
from tools.measure import Record, Row, alternate, hand_over  # noqa: E402
from tools.peers.engine_client import ask_all  # noqa: E402
from tools.workload import long_tailed, random_model  # noqa: E402

HOST = "127.0.0.1"
MRL, SAME, TEXT = "mrl: router, gate, engine", "bare client, the same requests", "bare client, text alone"


def parse(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    one_engine.add_options(parser)
    one_engine.add_model_options(parser, "qwen2.5-1.5b")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--at-once", type=int, default=256, help="rollout.max_concurrent_requests")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--median", type=int, default=256, help="tokens of a response")
    parser.add_argument("--sigma", type=float, default=0.8, help="of the lengths' logarithm")
    parser.add_argument("--longest", type=int, default=1024, help="lengths are cut there")
    parser.add_argument("--rounds", type=int, default=4, help="of which the median counts")
    return parser.parse_args(argv)


def experiment(options: argparse.Namespace, model: Path, port: int) -> Experiment:
    return Experiment.model_validate({
        "name": "bench-rollout", "model": {"path": str(model), "dtype": options.dtype},
        "data": {"train": "unused", "max_prompt_tokens": options.prompt},
        "batch": {"prompts_per_step": 1, "samples_per_prompt": 2},
        "rollout": {"engine": options.engine, "python": options.python, "parallel": {"tp": options.engine_tp},
                    "host": HOST, "port": port, "max_concurrent_requests": options.at_once,
                    "args": one_engine.arguments(options, graphs=not options.eager),
                    "sampling": {"max_response_tokens": options.longest}, "start_timeout_s": options.start_timeout},
        "loop": {"steps": 1, "mode": "colocated_sync", "sleep_engines": False},
        "cluster": {"device": options.device, "gpus": options.engine_tp}})


def make_requests(options: argparse.Namespace, vocab: int) -> list[GenerateRequest]:
    lengths = long_tailed(options.requests, options.median, options.sigma, options.longest)
    prompts = torch.randint(3, vocab, (options.requests, options.prompt), generator=torch.Generator().manual_seed(1))
    return [GenerateRequest(prompt, seed, length, 1.0)
            for seed, (prompt, length) in enumerate(zip(prompts.tolist(), lengths))]


def ways(options: argparse.Namespace, gate: ray.actor.ActorHandle, url: str,
         requests: Sequence[GenerateRequest]) -> dict[str, Callable[[], Awaitable[int]]]:
    """By name, what samples all requests and returns the tokens sampled."""
    async def through_mrl() -> int:
        router = Router([gate], deadline_s=3600.0)
        done = await asyncio.gather(*map(router.generate, requests))
        return sum(len(routed.completion.token_ids) for routed in done)

    def bare(log_probs: bool) -> Callable[[], Awaitable[int]]:
        return lambda: ask_all(url, options.engine, MODEL_NAME, requests, options.at_once, log_probs)

    return {MRL: through_mrl, SAME: bare(True), TEXT: bare(False)}


def rate(sample: Callable[[], Awaitable[int]]) -> float:
    """Tokens sampled a second."""
    began = time.perf_counter()
    return asyncio.run(sample()) / (time.perf_counter() - began)


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = options.model or random_model(folder / "model", options.shape, torch.device(options.device))
        requests = make_requests(options, model_spec(read_config(model)).vocab)
        with reserve_port(HOST, 0, "rollout.port") as port:
            exp = experiment(options, model, port)
        with one_engine.running(exp, folder, load_weights=True) as gate:
            rates = alternate({way: lambda sample=sample: rate(sample) for way, sample in
                               ways(options, gate, f"http://{HOST}:{port}", requests).items()}, options.rounds)
    lengths = [request.max_tokens for request in requests]
    about = (f"{options.model or options.shape}, {options.dtype}, {options.engine} on {options.engine_tp} "
             f"{options.device} devices; {len(requests)} requests, {options.at_once} at once, prompts of "
             f"{options.prompt} tokens, responses of up to {sum(lengths)} tokens, median {options.median}, longest "
             f"{max(lengths)}; medians of {options.rounds}")
    hand_over(Record("bench_rollout", about, rows(rates)), options.json)


def rows(rates: dict[str, float]) -> list[Row]:
    """Every way beside both of the bare client's."""
    return [Row(way, value, "tokens/s", value / rates[SAME], SAME, f"{value / rates[TEXT]:.3f} of {TEXT}")
            for way, value in rates.items()]


if __name__ == "__main__":
    main()
