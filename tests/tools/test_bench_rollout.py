"""The parts of the sampling benchmarks that need no engine: requests, experiments, the bare client, differences."""
import asyncio

import pytest
import torch
from aiohttp import web

from mrl.engine.api import Completion, GenerateRequest, Version
from mrl.reshard import Layout
from tools import bench_rollout, logprob_diff
from tools.peers.engine_client import ask_all
from tools.workload import shape_only

WORDS = ["--python", "python", "--device", "cpu"]


def test_requests_and_experiment_follow_the_options(tmp_path):
    options = bench_rollout.parse([*WORDS, "--requests", "50", "--prompt", "8", "--longest", "100", "--median", "40"])
    requests = bench_rollout.make_requests(options, 512)
    assert requests == bench_rollout.make_requests(options, 512) and len(requests) == 50
    assert all(len(one.prompt_ids) == 8 and 16 <= one.max_tokens <= 100 for one in requests)
    assert len({one.max_tokens for one in requests}) > 20 and len({one.seed for one in requests}) == 50
    exp = bench_rollout.experiment(options, shape_only(tmp_path / "model", "tiny"), 1234)
    assert (exp.engine_tokens, exp.rollout.max_concurrent_requests, exp.engine_count) == (108, 256, 1)


def test_rates_are_compared_with_both_of_the_bare_client():
    rates = {bench_rollout.MRL: 90.0, bench_rollout.SAME: 100.0, bench_rollout.TEXT: 120.0}
    mrl, same, text = bench_rollout.rows(rates)
    assert (mrl.ratio, same.ratio, text.ratio) == (0.9, 1.0, 1.2) and mrl.notes.startswith("0.750 of")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_bare_client_asks_for_everything_and_not_all_at_once(engine):
    heard, under_way = [], []

    async def answer(request: web.Request) -> web.Response:
        asked = await request.json()
        heard.append(asked)
        under_way.append(1 + (under_way[-1] if under_way else 0))
        await asyncio.sleep(0.01)
        under_way.append(under_way[-1] - 1)
        if engine == "vllm":
            return web.json_response({"usage": {"completion_tokens": asked["max_tokens"]}})
        return web.json_response({"meta_info": {"completion_tokens": asked["sampling_params"]["max_new_tokens"]}})

    async def ask(log_probs: bool) -> int:
        app = web.Application()
        app.router.add_post("/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        requests = [GenerateRequest([seed, 1], seed, 1 + seed, 1.0) for seed in range(10)]
        try:
            return await ask_all(f"http://127.0.0.1:{port}", engine, "mrl", requests, 3, log_probs)
        finally:
            await runner.cleanup()

    for log_probs in (True, False):
        heard.clear()
        assert asyncio.run(ask(log_probs)) == sum(range(1, 11)) and len(heard) == 10
        assert max(under_way) == 3
        wants = [one["return_logprob"] if engine == "sglang" else "logprobs" in one for one in heard]
        assert wants == [log_probs] * 10


def test_log_probs_are_compared_token_by_token_and_only_where_sampled(one_rank):
    class StandIn:
        layout, dp_rank = Layout(), 0

        def log_probs(self, microbatches):  # minus a hundredth of the token
            return [-0.01 * sample["tokens"].float() for microbatch in microbatches for sample in microbatch]

    def sampled(prompt, tokens, error):
        return prompt, Completion(tokens, [-0.01 * token + error for token in tokens], "stop", Version(0, 0))

    found = logprob_diff.differences(StandIn(), [sampled([90, 91], [1, 2, 3], 0.5), sampled([92], [4], -0.25)])
    assert found.tolist() == pytest.approx([-0.5, -0.5, -0.5, 0.25])
    mean, _, largest, signed = logprob_diff.rows(torch.tensor([-0.5, 0.25]))
    assert (mean.value, largest.value, signed.value) == (0.375, 0.5, -0.125)
