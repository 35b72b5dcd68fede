"""Advantages of a batch against values worked out by hand, and against tests/reference on random batches."""
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.algorithm.advantages import Scored, estimate
from mrl.config.algorithm import Algorithm
from tests.reference import advantages as reference

NAMES = ["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "pass_at_k", "gae"]


def scored(group=0, reward=0.0, mask=(0, 1, 1), **fields):
    tensors = {name: value if isinstance(value, float) else torch.tensor(value) for name, value in fields.items()}
    return Scored(group, reward, torch.tensor(mask, dtype=torch.bool), **tensors)


def rows(algorithm, *sequences):
    return [e.advantage.tolist() for e in estimate(algorithm, sequences)]


def test_what_a_sample_earned_stands_at_its_sampled_tokens():
    got = estimate(Algorithm(), [scored(0, 1.0, (0, 1, 0, 1)), scored(0, 0.0, (0, 1)), scored(1, 5.0)])
    half = math.sqrt(0.5)
    assert [e.advantage.tolist() for e in got] == [
        pytest.approx([0, half, 0, half]), pytest.approx([0, -half]), [0, 0, 0]]
    assert all(e.advantage.dtype == torch.float32 and e.returns is None for e in got)


def test_a_penalty_counts_for_the_whole_response_where_a_response_is_one_action():
    got = rows(Algorithm(name="rloo"), scored(0, 1.0, penalty=[math.nan, 0.25, 0.5]), scored(0, 0.0))
    assert got == [[0, 0.25, 0.25], [0, -0.25, -0.25]]


def test_reinforce_plus_plus_adds_up_what_follows():
    plain = Algorithm(name="reinforce_plus_plus", whiten=False)
    assert rows(plain, scored(0, 1.0, penalty=[9.0, 0.25, 0.5])) == [[0, 0.25, 0.5]]
    baseline = Algorithm(name="reinforce_plus_plus_baseline", whiten=False)
    assert rows(baseline, scored(0, 1.0, penalty=[9.0, 0.25, 0.5]), scored(0, 0.0)) == [[0, -0.25, 0], [0, -0.5, -0.5]]


def test_reinforce_plus_plus_whitens_over_all_tokens_of_the_batch():
    # Four tokens of reward 1 and one of 0: mean 0.8, variance 0.16.
    got = rows(Algorithm(name="reinforce_plus_plus"), scored(0, 1.0, (0, 1, 1, 1, 1)), scored(1, 0.0, (0, 1)))
    assert got == [pytest.approx([0, 0.5, 0.5, 0.5, 0.5]), pytest.approx([0, -2])]


def test_remax_compares_with_the_greedy_answer():
    assert rows(Algorithm(name="remax"), scored(0, 1.0, baseline=0.25), scored(0, 0.0, baseline=0.25)) == [
        [0, 0.75, 0.75], [0, -0.25, -0.25]]
    with pytest.raises(ValueError, match="sequence 1 has no baseline.*remax"):
        rows(Algorithm(name="remax"), scored(baseline=0.25), scored())


def test_gae_by_hand():
    # delta = [0 + .5 - .25, 1 - .5] = [.25, .5]; A = [.25 + .5 * .5, .5].
    ppo = Algorithm(name="gae", gae={"gamma": 1.0, "lam": 0.5}, whiten=False)
    [got] = estimate(ppo, [scored(0, 1.0, values=[7.0, 0.25, 0.5])])
    assert got.advantage.tolist() == [0, 0.5, 0.5] and got.returns.tolist() == [0, 0.75, 1.0]


def test_gae_skips_what_was_not_sampled_and_keeps_the_last_reward():
    ppo = Algorithm(name="gae", gae={"gamma": 0.9, "lam": 0.8}, whiten=False)
    nan = math.nan
    [alone, gaps] = estimate(ppo, [
        scored(0, 1.0, (1, 1, 1), values=[0.1, 0.2, 0.3]),
        scored(1, 1.0, (0, 1, 0, 1, 1, 0, 0), values=[nan, 0.1, nan, 0.2, 0.3, nan, math.inf])])
    assert gaps.advantage[[1, 3, 4]].tolist() == alone.advantage.tolist()
    assert gaps.returns[[0, 2, 5, 6]].tolist() == [0.0] * 4 and alone.advantage[-1] == pytest.approx(0.7)
    with pytest.raises(ValueError, match="sequence 0 has no values.*gae"):
        estimate(ppo, [scored()])


@pytest.mark.parametrize("name", NAMES)
def test_equal_rewards_give_exactly_zero(name):
    algorithm = Algorithm(name=name, std="biased", pass_k=2)
    value, zeros = float(torch.tensor(0.3)), [0.0, 0.0, 0.0]
    got = rows(algorithm, *[scored(0, value, baseline=value, values=[value] * 3) for _ in range(8)])
    assert got == [zeros] * 8


@pytest.mark.parametrize("name", NAMES)
def test_batches_with_nothing_in_them(name):
    algorithm = Algorithm(name=name, std="biased")
    empty = dict(mask=(0, 0), baseline=0.5, values=[math.nan] * 2, penalty=[math.nan] * 2)
    assert estimate(algorithm, []) == []
    assert rows(algorithm, scored(0, 1.0, **empty), scored(0, 0.0, **empty)) == [[0, 0], [0, 0]]


def test_a_response_without_tokens_counts_in_its_group():
    assert rows(Algorithm(std="none"), scored(0, 0.0), scored(0, 1.0, (0, 0))) == [[0, -0.5, -0.5], [0, 0]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_an_error_that_says_where(bad):
    with pytest.raises(ValueError, match=r"reward\[2\]"):
        rows(Algorithm(), scored(), scored(), scored(reward=bad))
    with pytest.raises(ValueError, match=r"sequence 1: penalty\[0\]"):
        rows(Algorithm(), scored(penalty=[0.0] * 3), scored(penalty=[bad, bad, 0.0]))
    with pytest.raises(ValueError, match=r"baseline\[0\]"):
        rows(Algorithm(name="remax"), scored(baseline=bad))


finite = st.floats(-3, 3, width=32)
graded = st.sampled_from([0.0, 1.0, 0.5, -1.0, 0.25])


@st.composite
def batches(draw):
    sequences = []
    for _ in range(draw(st.integers(1, 9))):
        mask = draw(st.lists(st.booleans(), min_size=1, max_size=5))
        numbers = st.lists(finite, min_size=len(mask), max_size=len(mask))
        sequences.append({"group": draw(st.integers(0, 2)), "reward": draw(graded), "mask": mask,
                          "baseline": draw(graded), "values": draw(numbers),
                          "penalty": draw(st.one_of(st.just([0.0] * len(mask)), numbers))})
    return sequences


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(batches(), st.sampled_from(["unbiased", "biased", "none"]), st.integers(1, 3), st.floats(0, 1), st.floats(0, 1),
       st.booleans())
def test_random_batches(name, batch, std, k, gamma, lam, whiten):
    algorithm = Algorithm(name=name, std=std, pass_k=k, gae={"gamma": gamma, "lam": lam}, whiten=whiten)
    got = estimate(algorithm, [
        Scored(s["group"], s["reward"], torch.tensor(s["mask"]), s["baseline"], torch.tensor(s["values"]),
               torch.tensor(s["penalty"])) for s in batch])
    expected, returns = reference.estimate(name, batch, std, k, gamma, lam, whiten)
    for index, sequence in enumerate(got):
        torch.testing.assert_close(sequence.advantage, torch.tensor(expected[index]), atol=1e-6, rtol=1e-6)
        if name == "gae":
            torch.testing.assert_close(sequence.returns, torch.tensor(returns[index]), atol=1e-6, rtol=1e-6)
