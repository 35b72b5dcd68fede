"""Checks of filters, dynamic sampling and the overlong penalty."""
import pytest

from mrl.config.checks import check_experiment
from mrl.config.load import load_experiment

ZERO_VARIANCE = "rollout.filters.zero_variance=true"


def found(experiment_file, *overrides) -> dict:
    problems = check_experiment(load_experiment(experiment_file, overrides), None)
    return {problem.key: str(problem) for problem in problems}


@pytest.mark.parametrize("overrides, key, words", [
    (["rollout.filters={accuracy_min: 0.8, accuracy_max: 0.2}"], "rollout.filters.accuracy_min",
     "at most rollout.filters.accuracy_max (0.2)"),
    ([ZERO_VARIANCE, "batch.samples_per_prompt=1"], "rollout.filters.zero_variance", "every group would be left out"),
    (["rollout.oversample=4"], "rollout.oversample", "0 without rollout.filters"),
    ([ZERO_VARIANCE, "rollout.oversample=9", "rollout.dynamic_sampling.max_gen_batches=2"], "rollout.oversample",
     "at most 8: a step draws no more than"),
    (["reward.overlong.buffer_tokens=17"], "reward.overlong.buffer_tokens",
     "at most rollout.sampling.max_response_tokens (16)"),
])
def test_what_cannot_work(experiment_file, overrides, key, words):
    assert words in found(experiment_file, *overrides)[key]


def test_what_can(experiment_file):
    assert found(experiment_file, ZERO_VARIANCE, "rollout.filters.accuracy_min=0.1", "rollout.oversample=8",
                 "rollout.dynamic_sampling={max_gen_batches: 2, at_limit: error}", "rollout.priority.by=learnability",
                 "reward.overlong={buffer_tokens: 16, penalty: 0, mask_truncated: true}") == {}
