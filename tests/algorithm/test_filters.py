"""Which groups are left out."""
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrl.algorithm.filters import accuracy, rejection
from mrl.algorithm.groups import group_relative
from mrl.config.schema import Filters


@pytest.mark.parametrize("rewards, reason", [
    ([1, 0, 0, 0], None), ([0, 0, 0, 0], "zero_variance"), ([1, 1, 1, 1], "zero_variance"),
    ([0.3] * 8, "zero_variance"), ([0.1 + 0.2, 0.3], "zero_variance"), ([0.5, 0.5001], None),
    ([-1, 1], None), ([7], "zero_variance")])
def test_groups_of_equal_rewards(rewards, reason):
    assert rejection(rewards, Filters(zero_variance=True)) == reason
    assert rejection(rewards, Filters()) is None


@pytest.mark.parametrize("rewards, reason", [
    ([1, 1, 1, 1], "accuracy_high"), ([1, 1, 1, 0], None), ([1, 0, 0, 0], None), ([0.99, 0, 0, 0], "accuracy_low"),
    ([2, 0, 0, 0], None)])
def test_the_band_is_inclusive_and_counts_full_marks(rewards, reason):
    assert rejection(rewards, Filters(accuracy_min=0.25, accuracy_max=0.75)) == reason


def test_accuracy_is_the_share_of_full_marks():
    assert accuracy([1, 0.5, 2, 0]) == 0.5


@given(st.lists(st.sampled_from([0.0, 0.1, 0.3, 0.1 + 0.2, 1.0, 1e-8, -2.0]), min_size=1, max_size=6))
def test_zero_variance_is_where_no_sample_has_an_advantage(rewards):
    advantages = group_relative(torch.tensor(rewards, dtype=torch.float64), torch.zeros(len(rewards)), "unbiased")
    assert (rejection(rewards, Filters(zero_variance=True)) is None) == bool(advantages.any())
