"""How each engine's server is started and what its answers become: command, environment, completions."""
import asyncio
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from mrl.engine.api import EngineClosed, GenerateRequest
from mrl.engine.engines import SERVERS
from mrl.engine.flags import OWNED_FLAGS
from mrl.engine.http import HttpServer
from tests.rollout.experiments import experiment

ENGINES = sorted(SERVERS)
LENGTH_FLAG = {"vllm": "--max-model-len", "sglang": "--context-length"}
TP_FLAG = {"vllm": "--tensor-parallel-size", "sglang": "--tp-size"}
CPU_ONLY = {"vllm": {"--enforce-eager", "--no-enable-chunked-prefill", "--attention-backend"},
            "sglang": {"--disable-cuda-graph", "--disable-overlap-schedule", "--sleep-on-idle", "--device",
                       "--max-total-tokens"}}
FREE = {"vllm": {"--max-num-seqs", "--enable-prefix-caching", "--disable-uvicorn-access-log", "--enforce-eager",
                 "--no-enable-chunked-prefill", "--max-num-batched-tokens", "--attention-backend"},
        "sglang": {"--max-running-requests", "--log-level-http", "--grammar-backend", "--attention-backend",
                   "--max-total-tokens", "--disable-cuda-graph", "--disable-overlap-schedule", "--skip-server-warmup",
                   "--sleep-on-idle"}}


def server(engine: str, gpus=(), load_weights: bool = False, **sections) -> HttpServer:
    sections["rollout"] = {"engine": engine, **sections.get("rollout", {})}
    return SERVERS[engine](experiment(**sections), 1, "run", 4, Path("log"), gpus, load_weights)


def value_of(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


@pytest.mark.parametrize("engine", ENGINES)
def test_command_line(engine, tmp_path):
    sections = {"model": {"path": str(tmp_path), "dtype": "bfloat16"}, "data": {"train": "-", "max_prompt_tokens": 100},
                "rollout": {"python": "py", "parallel": {"tp": 2}, "sampling": {"max_response_tokens": 28}}}
    command = server(engine, **sections).command_line(1234)
    assert command[0] == "py" and value_of(command, "--port") == "1234" and value_of(command, "--dtype") == "bfloat16"
    assert value_of(command, LENGTH_FLAG[engine]) == "128"
    assert value_of(command, TP_FLAG[engine]) == "2"
    assert value_of(command, "--load-format") == "dummy"
    assert CPU_ONLY[engine] <= set(command)
    on_gpu = server(engine, gpus=[0, 1], load_weights=True, **sections).command_line(1234)
    assert not CPU_ONLY[engine] & set(on_gpu) and value_of(on_gpu, "--load-format") == "auto"


def test_log_probs_are_of_the_distribution_sampled_from():
    assert value_of(server("vllm").command_line(1), "--logprobs-mode") == "processed_logprobs"
    assert server("sglang").environment()["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "false"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("gpus", [(), (0,)])
def test_every_flag_of_the_command_is_owned_or_may_be_given_again(engine, gpus):
    flags = {word for word in server(engine, gpus).command_line(1) if word[:2] == "--"}
    assert flags - FREE[engine] <= OWNED_FLAGS[engine].keys() and not FREE[engine] & OWNED_FLAGS[engine].keys()


ROUTES = {"vllm": "/v1/completions", "sglang": "/generate"}


def answer_of(engine: str, finish_reason: str, log_probs: list[float]) -> dict:
    if engine == "vllm":
        return {"choices": [{"token_ids": [7], "logprobs": {"token_logprobs": log_probs},
                             "finish_reason": finish_reason}]}
    return {"output_ids": [7], "meta_info": {"finish_reason": {"type": finish_reason},
                                             "output_token_logprobs": [[value, 7, None] for value in log_probs]}}


def exchange(engine: str, answer: dict, ask):
    """What `ask(server object)` returns when the server gives `answer`; the request that it was sent."""
    sent = []

    async def respond(request):
        sent.append(await request.json())
        return web.json_response(answer)

    async def main():
        application = web.Application()
        application.router.add_post(ROUTES[engine], respond)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        asked = server(engine)
        asked.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        asked.session = aiohttp.ClientSession()
        try:
            return await ask(asked)
        finally:
            await asked.stop()
            await runner.cleanup()

    return asyncio.run(main()), sent[0]


def complete(engine: str, finish_reason: str, log_probs=(-0.5,)):
    """What the server object makes of a server's answer with this finish_reason; the request that it sent."""
    async def ask(asked):
        return await asked.generate(GenerateRequest([1], seed=5, max_tokens=4, temperature=0.5))
    return exchange(engine, answer_of(engine, finish_reason, list(log_probs)), ask)


@pytest.mark.parametrize("engine", ENGINES)
def test_only_whole_completions_are_returned(engine):
    assert complete(engine, "stop")[0] == ([7], [-0.5], "stop")
    assert complete(engine, "length")[0] == ([7], [-0.5], "length")
    with pytest.raises(EngineClosed, match="aborted the request half way"):
        complete(engine, "abort")
    with pytest.raises(RuntimeError, match="finish_reason 'repetition'"):
        complete(engine, "repetition")
    with pytest.raises(RuntimeError, match="1 tokens but 2 log-probs"):
        complete(engine, "stop", [-0.5, -0.5])


def test_what_is_asked_for():
    _, vllm = complete("vllm", "stop")
    _, sglang = complete("sglang", "stop")
    assert (vllm["seed"], vllm["max_tokens"], vllm["temperature"], vllm["prompt"]) == (5, 4, 0.5, [1])
    sampling = sglang["sampling_params"]
    assert (sampling["sampling_seed"], sampling["max_new_tokens"], sampling["temperature"]) == (5, 4, 0.5)
    assert sglang["input_ids"] == [1] and sglang["return_logprob"] is True


@pytest.mark.parametrize("engine", ENGINES)
def test_environment(engine, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("PYTHONPATH", "/inherited")
    sections = {"model": {"path": str(tmp_path)}, "rollout": {"python": "py", "env": {"OMP_NUM_THREADS": "2"}}}
    env = server(engine, **sections).environment()
    assert "RANK" not in env and env["OMP_NUM_THREADS"] == "2" and env["CUDA_VISIBLE_DEVICES"] == ""
    first, *_, last = env["PYTHONPATH"].split(":")
    assert first.endswith("receiver") and last == "/inherited"
    assert (env["MRL_RUN_ID"], env["MRL_ENGINE"], env["MRL_INCARNATION"]) == ("run", "1", "4")
    assert env["HF_HUB_OFFLINE"] == "1"
    assert server(engine, gpus=[2, 3], **sections).environment()["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_sglangs_stand_ins_are_for_the_cpu_alone(monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    on_cpu, on_gpu = server("sglang"), server("sglang", gpus=[0])
    assert any("sglang_cpu" in path for path in on_cpu.environment()["PYTHONPATH"].split(":"))
    assert any("sglang_cpu" in word for word in on_cpu.command_line(1))
    everything = [*on_gpu.command_line(1), *map("=".join, on_gpu.environment().items())]
    assert not [word for word in everything if "sglang_cpu" in word or "SGLANG_USE_CPU_ENGINE" in word]


def score(engine: str, answer: dict, tokens=(5, 6, 7)):
    """What the server object makes of a server's answer about the log-probs of `tokens`; the request that it sent."""
    async def ask(asked):
        return await asked.score(list(tokens))
    return exchange(engine, answer, ask)


SCORES = {
    "vllm": lambda values: {"choices": [{"prompt_logprobs": [
        value if value is None else {str(token): {"logprob": value}, "99": {"logprob": -0.1}}
        for token, value in zip((5, 6, 7), values)]}]},
    "sglang": lambda values: {"meta_info": {"input_token_logprobs": [
        [value, token, None] for token, value in zip((5, 6, 7), values)]}},
}


@pytest.mark.parametrize("engine", ENGINES)
def test_log_probs_of_given_tokens(engine):
    log_probs, sent = score(engine, SCORES[engine]([None, -1.5, -0.25]))
    assert log_probs == [0.0, -1.5, -0.25]
    asked = (sent["prompt"], sent["prompt_logprobs"]) if engine == "vllm" else (
        sent["input_ids"], sent["logprob_start_len"])
    assert asked == ([5, 6, 7], 0)


@pytest.mark.parametrize("engine", ENGINES)
def test_missing_log_probs_are_an_error(engine):
    with pytest.raises(RuntimeError, match="given 3 tokens to score and returned 1 log-probs of 3"):
        score(engine, SCORES[engine]([None, -1.5, None]))
