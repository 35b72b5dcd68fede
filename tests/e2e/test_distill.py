"""On-policy distillation with a real teacher: an untrained model becomes like the quickstart's warm-started one.

In distillation the reward has no say and is only logged: here it has every kind of part, one behind a server.
"""
from __future__ import annotations

import pickle
import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.reward_server import reward_server, served_score
from tests.e2e.runs import MRL, assert_nothing_left, finish, rows, start, trajectories

pytestmark = pytest.mark.slow
STEPS, PROMPTS = 24, 128
PARTS = ("{right: {kind: exact, weight: 0.5}, form: {kind: format, pattern: '[0-9]+', weight: 0.25}, "
         "short: {kind: length, full: 0, zero: 8, weight: -0.25}, served: {kind: http, url: '%s', backoff_s: 0.05}}")
WEIGHTS = {"right": 0.5, "form": 0.25, "short": -0.25, "served": 1.0}


@pytest.fixture(scope="module", params=["vllm", pytest.param("sglang", marks=pytest.mark.long)])
def distilled(request, warm_start, home, tmp_path_factory):
    """The run directory; the teacher's engine is the parameter, the student's is vLLM."""
    python = home / request.param / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no {python}")
    folder = tmp_path_factory.mktemp(request.param)
    with reward_server() as url:
        process = start([str(MRL), "train", "configs/distill_cpu.yaml", "--run-dir", str(folder / "run"),
                         f"loop.steps={STEPS}", "eval.every=0", f"teacher.engine={request.param}",
                         f"teacher.python={python}", "cluster.trainer_gpus=1", "trainer.parallel.tp=1",
                         "reward.kind=null", f"reward.parts={PARTS % url}", f"log.trajectories_per_step={PROMPTS}",
                         f"batch.prompts_per_step={PROMPTS}", f"checkpoint.every={STEPS // 2}"], folder / "log")
        finish(process, folder / "log", timeout_s=900)
    yield folder / "run"
    assert_nothing_left(folder / "log")


def test_the_student_comes_close_to_its_teacher(distilled):
    divergence = [row["distill/reverse_kl"] for row in rows(distilled, "train")]
    assert all(row["timing/teach_sequences"] > 0 for row in rows(distilled, "train"))
    first, last = sum(divergence[:3]) / 3, sum(divergence[-3:]) / 3
    assert first > 1 and last < 0.75 * first, divergence


def test_the_teachers_log_probs_are_its_own(distilled, warm_start):
    """Of the batch that waits in a checkpoint, against transformers."""
    groups = pickle.loads((distilled / "checkpoints" / f"step_{STEPS // 2:06d}" / "batch.pkl").read_bytes())
    teacher = AutoModelForCausalLM.from_pretrained(warm_start, dtype=torch.float32)
    for group in groups[:8]:
        for t in group.trajectories:
            tokens = torch.from_numpy(t.tokens.copy())
            with torch.no_grad():
                log_p = teacher(tokens[None]).logits[0, :-1].log_softmax(-1)
            expected = log_p.gather(1, tokens[1:, None])[:, 0]
            sampled = torch.from_numpy(t.loss_mask[1:].copy())
            torch.testing.assert_close(torch.from_numpy(t.teacher_log_prob[1:])[sampled], expected[sampled],
                                       atol=1e-3, rtol=0)
            assert not t.teacher_log_prob[~t.loss_mask].any()


def test_every_part_of_the_reward_is_logged_and_what_was_not_scored_is_counted(distilled):
    for step in rows(distilled, "train"):
        samples = trajectories(distilled, f"step_{step['step'] - 1:06d}")
        assert len(samples) == PROMPTS
        for sample in samples:
            parts, response, score = sample["reward_parts"], sample["response"], served_score(sample["response"])
            assert parts["right"] == (response.strip() == sample["answer"]) and parts["served"] == (score or 0.0)
            assert parts["form"] == bool(re.fullmatch("[0-9]+", response.strip()))
            assert sample["reward"] == pytest.approx(sum(weight * parts[name] for name, weight in WEIGHTS.items()))
            assert (sample["reward_error"] is None) == (score is not None), sample
        assert step["reward/errors"] == sum(served_score(sample["response"]) is None for sample in samples)
        for name in WEIGHTS:
            mean = sum(sample["reward_parts"][name] for sample in samples) / PROMPTS
            assert step[f"reward/{name}"] == pytest.approx(mean), name
        assert step["rollout/accuracy"] == step["reward/right"]
    assert "served: invalid: the server gave None where a finite number belongs" in (
        distilled / "progress.log").read_text()
