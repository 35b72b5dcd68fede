"""Comparisons inside a group against values worked out by hand."""
import math

import pytest
import torch

from mrl.algorithm.groups import group_relative, leave_one_out, pass_at_k


def compare(function, rewards, groups=None, **arguments):
    ids = torch.tensor([0] * len(rewards) if groups is None else groups)
    return function(torch.tensor(rewards, dtype=torch.float64), ids, **arguments).tolist()


def grpo(rewards, groups=None, std="unbiased"):
    return compare(group_relative, rewards, groups, std=std)


@pytest.mark.parametrize("rewards, std, expected", [
    ([1, 0], "unbiased", [0.70711, -0.70711]),
    ([1, 0, 0, 0], "unbiased", [1.5, -0.5, -0.5, -0.5]),
    ([1, 0, 0, 0], "none", [0.75, -0.25, -0.25, -0.25]),
    ([1, 0, 0, 0], "biased", [1.73205, -0.57735, -0.57735, -0.57735]),
    ([1, 0, 0, 0, 0, 0, 0, 0], "unbiased", [2.47487] + [-0.35355] * 7),
])
def test_grpo(rewards, std, expected):
    assert grpo(rewards, std=std) == pytest.approx(expected, abs=1e-5)


def test_rloo():
    assert compare(leave_one_out, [1, 0, 0, 0]) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert compare(leave_one_out, [1, 0, 0.5, 2], [0, 0, 1, 1]) == pytest.approx([1, -1, -1.5, 1.5])


def test_pass_at_k_has_the_papers_values():
    # 4 samples, one right, k = 2: a choice holds it with probability 1/2; sigma = 1/2. A wrong one: 1/3 of its choices.
    right, wrong = compare(pass_at_k, [1, 0, 0, 0], k=2, std="biased")[:2]
    assert right == pytest.approx(1.0) and wrong == pytest.approx((1 / 3 - 1 / 2) / (1 / 2))
    assert compare(pass_at_k, [1, 0, 0, 0], k=2, std="none")[:2] == pytest.approx([0.5, -1 / 6])
    assert compare(pass_at_k, [1, 1, 1, 0], k=2, std="biased") == [0.0] * 4  # every choice holds a right one


def test_pass_at_1_is_grpo():
    rewards, groups = [1, 0, 0.5, 0.25, 3, 1, 1], [0, 0, 0, 1, 1, 1, 2]
    assert compare(pass_at_k, rewards, groups, k=1, std="biased") == pytest.approx(grpo(rewards, groups, "biased"))


def test_pass_at_k_of_too_small_a_group_is_zero():
    assert compare(pass_at_k, [1, 0], k=2, std="biased") == [0.0, 0.0]


ALL = [grpo, lambda rewards, groups=None: grpo(rewards, groups, "none"),
       lambda rewards, groups=None: compare(leave_one_out, rewards, groups),
       lambda rewards, groups=None: compare(pass_at_k, rewards, groups, k=2, std="biased")]


@pytest.mark.parametrize("function", ALL)
@pytest.mark.parametrize("value", [0.3, 0.1, 1.0, 0.0, -0.7, 1e-20, 1e20])
@pytest.mark.parametrize("size", [1, 2, 3, 8, 16])
def test_equal_rewards_give_exactly_zero(function, value, size):
    assert function([value] * size) == [0.0] * size


@pytest.mark.parametrize("function", ALL)
def test_rewards_equal_to_fp32_rounding_give_zero(function):
    third = torch.tensor(1.0) / 3
    rewards = torch.stack([third, torch.nextafter(third, torch.tensor(1.0)), third]).tolist()
    assert function(rewards) == [0.0] * 3


def test_a_real_but_small_difference_counts():
    assert grpo([1.0, 1.001])[1] == pytest.approx(math.sqrt(0.5), abs=1e-5)


def test_groups_are_told_apart_by_id_not_by_place_or_size():
    # Group 7 is [1, 0, 0, 0], group 3 is [1, 0], group 9 has one sample, group 5 equal rewards; interleaved.
    rewards = [1.0, 1.0, 0.0, 0.3, 0.0, 0.0, 5.0, 0.3, 0.0]
    groups = [7, 3, 7, 5, 3, 7, 9, 5, 7]
    half = math.sqrt(0.5)
    assert grpo(rewards, groups) == pytest.approx([1.5, half, -0.5, 0.0, -half, -0.5, 0.0, 0.0, -0.5])


def test_the_same_prompt_twice_in_a_batch_stays_two_groups():
    twice = grpo([1.0, 0.0, 0.0, 0.0, 1.0, 0.0], [0, 0, 0, 0, 1, 1])
    assert twice == pytest.approx(grpo([1.0, 0.0, 0.0, 0.0]) + grpo([1.0, 0.0]))
