"""The quickstart with a critic, as a user runs it: both models learn, and the checkpoint holds both."""
from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.e2e.runs import MRL, assert_nothing_left, finish, rows, start

pytestmark = pytest.mark.slow
STEPS, WARMUP = 40, 5


@pytest.fixture(scope="module")
def ppo(warm_start, tmp_path_factory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("ppo")
    run_dir, log = folder / "run", folder / "console.log"
    process = start([str(MRL), "train", "configs/quickstart_ppo_cpu.yaml", "--run-dir", str(run_dir),
                     f"loop.steps={STEPS}", f"eval.every={STEPS}"], log)
    finish(process, log, timeout_s=1200)
    return SimpleNamespace(run_dir=run_dir, log=log, steps=rows(run_dir, "train"), evals=rows(run_dir, "eval"))


def test_held_out_accuracy_rises(ppo):
    before, after = (ppo.evals[index]["eval/heldout/acc/mean@1"] for index in (0, -1))
    assert after - before >= 0.1, f"{before:.3f} -> {after:.3f}"


def test_the_critic_learns_first_and_comes_to_explain_returns(ppo):
    assert [step["step"] for step in ppo.steps] == list(range(1, STEPS + 1))
    assert ["actor/loss" in step for step in ppo.steps] == [False] * WARMUP + [True] * (STEPS - WARMUP)
    assert ppo.steps[0]["critic/value"] == 0.0
    assert all("timing/values" in step and "timing/update_critic" in step for step in ppo.steps)
    explained = [step["critic/explained_variance"] for step in ppo.steps]
    assert sum(explained[-10:]) / 10 > 0.02 > sum(explained[:10]) / 10, explained


def test_the_checkpoint_holds_both_and_nothing_is_left_running(ppo):
    saved = ppo.run_dir / "checkpoints" / f"step_{STEPS:06d}"
    shards = {path.name for path in saved.glob("weights_*.safetensors")}
    assert shards == {path.name for path in (saved / "critic").glob("weights_*.safetensors")} and len(shards) == 2
    assert_nothing_left(ppo.log)
