"""How a vLLM server is started and what its answers become: command, environment, completions."""
import asyncio

import aiohttp
import pytest
from aiohttp import web

from mrl.engine.api import EngineClosed, GenerateRequest
from mrl.engine.flags import OWNED_FLAGS
from mrl.engine.vllm import VllmServer, command_line, environment
from tests.rollout.experiments import experiment


def value_of(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_command_line(tmp_path):
    config = experiment(model={"path": str(tmp_path), "dtype": "bfloat16"},
                        data={"train": "-", "max_prompt_tokens": 100},
                        rollout={"python": "py", "parallel": {"tp": 2}, "sampling": {"max_response_tokens": 28},
                                 "args": ["--max-num-seqs", "7"]})
    command = command_line(config, 1, 1234, load_weights=False, on_cpu=True)
    assert value_of(command, "--max-model-len") == "128"
    assert value_of(command, "--tensor-parallel-size") == "2"
    assert value_of(command, "--load-format") == "dummy"
    assert value_of(command, "--logprobs-mode") == "processed_logprobs"
    assert "--enforce-eager" in command and command[-2:] == ["--max-num-seqs", "7"]
    on_gpu = command_line(config, 1, 1234, load_weights=True, on_cpu=False)
    assert "--enforce-eager" not in on_gpu and value_of(on_gpu, "--load-format") == "auto"


def test_every_flag_of_the_command_is_owned_or_may_be_given_again():
    free = {"--max-num-seqs", "--enable-prefix-caching", "--disable-uvicorn-access-log", "--enforce-eager",
            "--no-enable-chunked-prefill", "--max-num-batched-tokens"}
    flags = {word for word in command_line(experiment(), 0, 1, load_weights=False, on_cpu=True) if word[:2] == "--"}
    assert flags - free <= OWNED_FLAGS.keys() and not free & OWNED_FLAGS.keys()


def complete(finish_reason: str):
    """What VllmServer makes of a server's answer with this finish_reason."""
    async def answer(_):
        return web.json_response({"choices": [{"token_ids": [7], "logprobs": {"token_logprobs": [-0.5]},
                                               "finish_reason": finish_reason}]})

    async def main():
        application = web.Application()
        application.router.add_post("/v1/completions", answer)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server = VllmServer(experiment(), 0, "run", 1, None, (), load_weights=False)
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        server.session = aiohttp.ClientSession()
        try:
            return await server.generate(GenerateRequest([1], seed=0, max_tokens=4, temperature=1.0))
        finally:
            await server.stop()
            await runner.cleanup()

    return asyncio.run(main())


def test_only_whole_completions_are_returned():
    assert complete("stop") == ([7], [-0.5], "stop") and complete("length") == ([7], [-0.5], "length")
    with pytest.raises(EngineClosed, match="aborted the request half way"):
        complete("abort")
    with pytest.raises(RuntimeError, match="finish_reason 'repetition'"):
        complete("repetition")


def test_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("PYTHONPATH", "/inherited")
    config = experiment(model={"path": str(tmp_path)}, rollout={"python": "py", "env": {"OMP_NUM_THREADS": "2"}})
    env = environment(config, 1, "run", 4, gpus=[])
    assert "RANK" not in env and env["OMP_NUM_THREADS"] == "2" and env["CUDA_VISIBLE_DEVICES"] == ""
    receiver, rest = env["PYTHONPATH"].split(":", 1)
    assert receiver.endswith("receiver") and rest == "/inherited"
    assert (env["MRL_RUN_ID"], env["MRL_ENGINE"], env["MRL_INCARNATION"]) == ("run", "1", "4")
    assert env["HF_HUB_OFFLINE"] == "1"
    assert environment(config, 0, "run", 1, gpus=[2, 3])["CUDA_VISIBLE_DEVICES"] == "2,3"
