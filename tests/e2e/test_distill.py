"""On-policy distillation with a real teacher: an untrained model becomes like the quickstart's warm-started one."""
from __future__ import annotations

import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.runs import MRL, assert_nothing_left, finish, rows, start

pytestmark = pytest.mark.slow
STEPS = 24


@pytest.fixture(scope="module", params=["vllm", pytest.param("sglang", marks=pytest.mark.long)])
def distilled(request, warm_start, home, tmp_path_factory):
    """The run directory; the teacher's engine is the parameter, the student's is vLLM."""
    python = home / request.param / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no {python}")
    folder = tmp_path_factory.mktemp(request.param)
    process = start([str(MRL), "train", "configs/distill_cpu.yaml", "--run-dir", str(folder / "run"),
                     f"loop.steps={STEPS}", "eval.every=0", f"teacher.engine={request.param}",
                     f"teacher.python={python}", "cluster.trainer_gpus=1", "trainer.parallel.tp=1",
                     f"checkpoint.every={STEPS // 2}"], folder / "log")
    finish(process, folder / "log", timeout_s=900)
    yield folder / "run"
    assert_nothing_left(folder / "log")


def test_the_student_comes_close_to_its_teacher(distilled):
    divergence = [row["distill/reverse_kl"] for row in rows(distilled, "train")]
    assert all(row["timing/teach_sequences"] > 0 for row in rows(distilled, "train"))
    first, last = sum(divergence[:3]) / 3, sum(divergence[-3:]) / 3
    assert first > 1 and last < 0.6 * first, divergence


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
