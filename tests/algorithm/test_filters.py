"""Which groups are left out."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.algorithm.filters import rejection
from mrl.algorithm.groups import group_relative
from mrl.config.schema import Filters


@pytest.mark.parametrize("rewards, reason", [
    ([1, 0, 0, 0], None), ([0, 0, 0, 0], "zero_variance"), ([1, 1, 1, 1], "zero_variance"),
    ([0.3] * 8, "zero_variance"), ([0.1 + 0.2, 0.3], "zero_variance"), ([0.5, 0.5001], None),
    ([-1, 1], None), ([7], "zero_variance")])
def test_groups_of_equal_rewards(rewards, reason):
    assert rejection(rewards, 0.5, Filters(zero_variance=True)) == reason
    assert rejection(rewards, 0.5, Filters()) is None


@pytest.mark.parametrize("accuracy, reason", [
    (1.0, "accuracy_high"), (0.75, None), (0.25, None), (0.2, "accuracy_low"), (0.0, "accuracy_low")])
def test_the_band_is_inclusive(accuracy, reason):
    assert rejection([1, 1.2, 0, 0.3], accuracy, Filters(accuracy_min=0.25, accuracy_max=0.75)) == reason


@settings(deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.1, 0.3, 0.1 + 0.2, 1.0, 1e-8, -2.0]), min_size=1, max_size=6))
def test_zero_variance_is_where_no_sample_has_an_advantage(rewards):
    advantages = group_relative(torch.tensor(rewards, dtype=torch.float64), torch.zeros(len(rewards)), "unbiased")
    assert (rejection(rewards, 0.5, Filters(zero_variance=True)) is None) == bool(advantages.any())
