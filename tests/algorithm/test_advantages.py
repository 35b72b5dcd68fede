"""Group advantages against values worked out by hand."""
import math

import pytest
import torch

from mrl.algorithm.advantages import group_advantages


def advantages(rewards, groups=None, std=True):
    groups = [0] * len(rewards) if groups is None else groups
    return group_advantages(torch.tensor(rewards), torch.tensor(groups), normalize_by_std=std)


@pytest.mark.parametrize("rewards, std, expected", [
    ([1.0, 0.0], True, [0.70711, -0.70711]),
    ([1.0, 0.0, 0.0, 0.0], True, [1.5, -0.5, -0.5, -0.5]),
    ([1.0, 0.0, 0.0, 0.0], False, [0.75, -0.25, -0.25, -0.25]),
    ([1.0] + [0.0] * 7, True, [2.47487] + [-0.35355] * 7),
])
def test_values_by_hand(rewards, std, expected):
    result = advantages(rewards, std=std)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, torch.tensor(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize("value", [0.3, 0.1, 1.0, 0.0, -0.7, 1e-20, 1e20])
@pytest.mark.parametrize("size", [2, 3, 8, 16])
@pytest.mark.parametrize("std", [True, False])
def test_equal_rewards_give_exactly_zero(value, size, std):
    assert advantages([value] * size, std=std).tolist() == [0.0] * size


def test_rewards_equal_to_fp32_rounding_give_zero():
    third = torch.tensor(1.0) / 3
    rewards = torch.stack([third, torch.nextafter(third, torch.tensor(1.0)), third])
    assert group_advantages(rewards, torch.zeros(3, dtype=torch.int64), True).tolist() == [0.0] * 3


def test_a_real_but_small_difference_counts():
    assert advantages([1.0, 1.001])[1].item() == pytest.approx(math.sqrt(0.5), abs=1e-5)


def test_groups_are_told_apart_by_id_not_by_place_or_size():
    # Group 7 is [1, 0, 0, 0], group 3 is [1, 0], group 9 has one sample, group 5 equal rewards; interleaved.
    rewards = [1.0, 1.0, 0.0, 0.3, 0.0, 0.0, 5.0, 0.3, 0.0]
    groups = [7, 3, 7, 5, 3, 7, 9, 5, 7]
    half = math.sqrt(0.5)
    expected = torch.tensor([1.5, half, -0.5, 0.0, -half, -0.5, 0.0, 0.0, -0.5])
    torch.testing.assert_close(advantages(rewards, groups), expected, atol=1e-6, rtol=0)


def test_the_same_prompt_twice_in_a_batch_stays_two_groups():
    twice = advantages([1.0, 0.0, 0.0, 0.0, 1.0, 0.0], [0, 0, 0, 0, 1, 1])
    torch.testing.assert_close(twice[:4], advantages([1.0, 0.0, 0.0, 0.0]))
    torch.testing.assert_close(twice[4:], advantages([1.0, 0.0]))


@pytest.mark.parametrize("std", [True, False])
def test_a_group_of_one_gives_zero(std):
    assert advantages([3.0], std=std).tolist() == [0.0]


def test_an_empty_batch_is_an_empty_result():
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64), True).shape == (0,)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_an_error_naming_its_index(bad):
    with pytest.raises(ValueError, match=r"rewards\[2\]"):
        advantages([0.0, 1.0, bad])


def test_mismatched_shapes_are_an_error():
    with pytest.raises(ValueError, match="group_ids"):
        group_advantages(torch.zeros(3), torch.zeros(2, dtype=torch.int64), True)
