"""Each algorithm on the quickstart, from the same warm start: held-out accuracy rises.

GRPO is test_quickstart's, PPO with a critic test_ppo's.
"""
from __future__ import annotations

import pytest

from tests.e2e.runs import MRL, assert_nothing_left, finish, rows, start

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]
STEPS = 60
ALGORITHMS = {
    "rloo": ["algorithm.name=rloo"],
    "reinforce_plus_plus": ["algorithm.name=reinforce_plus_plus"],
    # A sequence's ratio moves less than a token's: PPO's bounds would not hold it at all.
    "gspo": ["algorithm.policy_loss=gspo", "algorithm.aggregation=sequence_mean", "algorithm.clip.low=0.03",
             "algorithm.clip.high=0.04"],
    # Nothing but the learning rate bounds a step: at 5e-4 it forgets what it knew. No lower bound, as published.
    "cispo": ["algorithm.policy_loss=cispo", "algorithm.clip.low=1.0", "trainer.optimizer.lr=2e-4"],
    "dapo": ["algorithm.clip.high=0.28", "rollout.filters.zero_variance=true", "rollout.oversample=8",
             "reward.overlong.buffer_tokens=2"],
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_held_out_accuracy_rises(name, warm_start, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "console.log"
    finish(start([str(MRL), "train", "configs/quickstart_cpu.yaml", "--run-dir", str(run_dir), f"loop.steps={STEPS}",
                  *ALGORITHMS[name]], log), log, timeout_s=1500)
    before, after = (rows(run_dir, "eval")[index]["eval/heldout/acc/mean@1"] for index in (0, -1))
    print(f"{name}: {before:.3f} -> {after:.3f}")
    assert after - before >= 0.15, f"{before:.3f} -> {after:.3f}"
    assert_nothing_left(log)
