"""How each engine's server is started and what its answers become: command, environment, completions."""
import asyncio
import json
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from mrl.engine.api import EngineClosed, GenerateRequest
from mrl.engine.engines import SERVERS
from mrl.engine.flags import OWNED_FLAGS
from mrl.engine.http import HttpServer
from tests.reshard.simulate import hf_config
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


@pytest.mark.parametrize("engine, sizes, given, left_out", [
    ("vllm", {"tp": 2}, "", "--enable-expert-parallel"), ("vllm", {"tp": 2, "ep": 2}, "--enable-expert-parallel", ""),
    ("sglang", {"tp": 4, "ep": 2}, "--ep-size 2", "--enable-dp-attention"),
    ("sglang", {"tp": 4, "ep": 4, "dp": 2}, "--ep-size 4 --dp-size 2 --enable-dp-attention", ""),
])
def test_how_an_engine_is_split(engine, sizes, given, left_out):
    one = server(engine, rollout={"parallel": sizes})
    command = f"{' '.join(one.command_line(1))} "
    assert all(f"--{flag}" in command for flag in given.split("--")[1:]) and (not left_out or left_out not in command)
    assert {word for word in given.split() if word[:2] == "--"} <= OWNED_FLAGS[engine].keys()


@pytest.mark.parametrize("engine, flag", [("vllm", "--hf-overrides"), ("sglang", "--json-model-override-args")])
def test_in_fp8_an_engine_sees_another_config_unless_it_reads_its_weights(engine, flag, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf_config("qwen3-moe")))
    sections = {"model": {"path": str(tmp_path)}, "rollout": {"quantization": "fp8"}}
    changes = json.loads(value_of(server(engine, **sections).command_line(1), flag))["quantization_config"]
    assert changes["quant_method"] == "fp8" and changes["weight_block_size"] == [128, 128]
    assert "model.layers.1.mlp.gate" in changes["modules_to_not_convert"] and flag in OWNED_FLAGS[engine]
    assert flag not in server(engine, load_weights=True, **sections).command_line(1)
    assert flag not in server(engine, model=sections["model"]).command_line(1)


SLEEP_FLAG = {"vllm": "--enable-sleep-mode", "sglang": "--enable-memory-saver"}
SHARED = {"loop": {"mode": "colocated_sync"}, "cluster": {"gpus": 1, "trainer_gpus": None, "rollout_gpus": None}}


@pytest.mark.parametrize("engine", ENGINES)
def test_only_engines_that_share_gpus_sleep_and_none_that_keeps_its_own_weights(engine):
    flag = SLEEP_FLAG[engine]
    one = server(engine, [0], **SHARED)
    assert flag in one.command_line(1) and flag in OWNED_FLAGS[engine]
    assert one.environment()["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:False"
    kept = {"mode": "colocated_sync", "sleep_engines": False}
    for other in (server(engine, **SHARED), server(engine, [0]), server(engine, [0], load_weights=True, **SHARED),
                  server(engine, [0], **{**SHARED, "loop": kept})):
        assert not other.sleeps and flag not in other.command_line(1)
        assert "expandable_segments" not in other.environment().get("PYTORCH_CUDA_ALLOC_CONF", "")


@pytest.mark.parametrize("engine", ENGINES)
def test_how_a_server_is_told_to_sleep_and_to_wake(engine):
    said = []

    async def answer(request):
        said.append((request.path_qs, await request.json()))
        return web.Response(text="" if engine == "vllm" else "null")

    async def both(one):
        await one.sleep(5.0)
        await one.wake("weights", 5.0)
        await one.wake("kv_cache", 5.0)

    asked(engine, "/{anything}", answer, both)
    assert said == {
        "vllm": [("/sleep?level=2", {}), ("/wake_up?tags=weights", {}), ("/wake_up?tags=kv_cache", {})],
        "sglang": [("/release_memory_occupation", {"tags": ["weights", "kv_cache"]}),
                   ("/resume_memory_occupation", {"tags": ["weights"]}),
                   ("/resume_memory_occupation", {"tags": ["kv_cache"]})]}[engine]


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


def asked(engine: str, route: str, answer, ask):
    """What `ask`, given the server object, makes of a server that answers a request to `route` by `answer`."""
    async def main():
        application = web.Application()
        application.router.add_post(route, answer)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        one = server(engine)
        one.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        one.session = aiohttp.ClientSession()
        try:
            return await ask(one)
        finally:
            await one.stop()
            await runner.cleanup()

    return asyncio.run(main())


def exchange(engine: str, answer: dict, ask):
    """What `ask`, given the server object, makes of this answer; the request that was sent."""
    sent = []

    async def respond(request):
        sent.append(await request.json())
        return web.json_response(answer)

    return asked(engine, ROUTES[engine], respond, ask), sent[0]


def complete(engine: str, finish_reason: str, log_probs=(-0.5,)):
    """What the server object makes of a server's answer with this finish_reason; the request that it sent."""
    request = GenerateRequest([1], seed=5, max_tokens=4, temperature=0.5)
    return exchange(engine, answer_of(engine, finish_reason, list(log_probs)), lambda one: one.generate(request))


@pytest.mark.parametrize("engine", ENGINES)
def test_only_whole_completions_are_returned(engine):
    assert complete(engine, "stop")[0] == ([7], [-0.5], "stop", None)
    assert complete(engine, "length")[0] == ([7], [-0.5], "length", None)
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


def test_of_the_replicas_in_an_sglang_engine_one_tells_what_all_workers_answer():
    answers = [{"error": None, "worker": 0}, {"error": "a | b", "worker": 1}]

    async def answer(_):
        return web.json_response({"success": True, "message": " | ".join([json.dumps(answers)] * 2)})

    found = asked("sglang", "/update_weights_from_tensor", answer, lambda one: one.call_workers("mrl_identity"))
    assert found == answers


RESETS = {"vllm": ("/reset_prefix_cache", [(200, '{"success": false}'), (200, '{"success": true}')]),
          "sglang": ("/flush_cache", [(400, "Flush cache failed"), (200, "Cache flushed")])}


def reset(engine: str, answers: list[tuple[int, str]], timeout_s: float = 300.0) -> None:
    """Reset the cache of a server that answers so, one after the other."""
    async def answer(_):
        status, text = answers.pop(0)
        return web.Response(status=status, text=text)

    asked(engine, RESETS[engine][0], answer, lambda one: one.reset_prefix_cache(timeout_s))


@pytest.mark.parametrize("engine", ENGINES)
def test_the_prefix_cache_is_reset_when_the_engine_says_so(engine):
    no, yes = RESETS[engine][1]
    answers = [no, yes]
    reset(engine, answers)
    assert not answers
    with pytest.raises(RuntimeError, match="could not reset its prefix cache"):
        reset(engine, [no] * 9, timeout_s=0.5)


@pytest.mark.parametrize("answer", ["", "{}", '{"success": null}', "[]"])
def test_a_reset_that_vllm_does_not_confirm_is_none(answer):
    with pytest.raises(RuntimeError, match="does not say whether it has reset.*vLLM releases 0.26.0 and 0.32.0"):
        reset("vllm", [(200, answer)])


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
    return exchange(engine, answer, lambda one: one.score(list(tokens)))


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
