"""Estimators against definitions by enumeration, and against numbers worked out by hand."""
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.evaluation.estimators import best_at_k, interval, majority_at_k, pass_at_k, subset_sizes
from tests.reference import evaluation as reference

SCORES = st.lists(st.sampled_from([-1.0, 0.0, 0.25, 1.0]), min_size=1, max_size=5)


@pytest.mark.parametrize("n, sizes", [(1, []), (2, [2]), (3, [2, 3]), (4, [2, 4]), (5, [2, 4, 5]),
                                      (32, [2, 4, 8, 16, 32]), (33, [2, 4, 8, 16, 32, 33])])
def test_sizes_are_powers_of_two_and_the_whole(n, sizes):
    assert subset_sizes(n) == sizes


def test_hand_values():
    one_of_four = [[True, False, False, False]]
    assert [float(pass_at_k(one_of_four, k)[0]) for k in (1, 2, 3, 4)] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    # 1 - C(7, 2) / C(10, 2) = 1 - 21/45
    assert pass_at_k([[True] * 3 + [False] * 7], 2)[0] == pytest.approx(24 / 45)
    # With replacement: 1 - (3/4)^2 and 1 - (3/4)^4, not 1.
    assert [float(best_at_k([[1, 0, 0, 0]], k)[0]) for k in (2, 4)] == pytest.approx([1 - 9 / 16, 1 - 81 / 256])
    assert majority_at_k([[1, 0, 0]], [[7, 8, 8]], 1, resamples=3000, seed=1)[0] == pytest.approx(1 / 3, abs=0.03)
    # Two draws: the first one's answer wins, by agreement or by being first.
    assert majority_at_k([[1, 0]], [[7, 8]], 2, resamples=4000, seed=1)[0] == pytest.approx(0.5, abs=0.03)
    # Three draws of two right and one wrong: at least two right in 20 of 27.
    assert majority_at_k([[1, 1, 0]], [[5, 5, 6]], 3, resamples=8000, seed=0)[0] == pytest.approx(20 / 27, abs=0.02)


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_counts_choices(correct, data):
    k = data.draw(st.integers(1, len(correct)))
    assert pass_at_k([correct], k)[0] == pytest.approx(reference.pass_at_k(correct, k), abs=1e-12)


@settings(deadline=None)
@given(SCORES, st.integers(1, 4))
def test_best_at_k_is_the_mean_over_all_sequences(scores, k):
    assert best_at_k([scores], k)[0] == pytest.approx(reference.best_at_k(scores, k), abs=1e-12)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0.0, 1.0])), min_size=1, max_size=4), st.integers(1, 4))
def test_majority_at_k_approaches_the_mean_over_all_sequences(samples, k):
    answers, scores = zip(*samples)
    estimate = majority_at_k([scores], [answers], k, resamples=4000, seed=3)[0]
    assert estimate == pytest.approx(reference.majority_at_k(samples, k), abs=0.05)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0.0, 0.5, 1.0])), min_size=2, max_size=6),
       st.integers(1, 6))
def test_every_single_resample_is_decided_as_defined(samples, k):
    answers, scores = zip(*samples)
    drawn = np.random.default_rng(9).integers(len(samples), size=(20, k))
    expected = np.mean([reference.majority_of([samples[i] for i in row]) for row in drawn])
    assert majority_at_k([scores], [answers], k, resamples=20, seed=9)[0] == pytest.approx(expected, abs=1e-12)


def test_prompts_do_not_disturb_each_other():
    rng = np.random.default_rng(0)
    scores, answers = rng.random((3, 4)), rng.integers(3, size=(3, 4))
    together = majority_at_k(scores, answers, 3, 50, 1), best_at_k(scores, 3), pass_at_k(scores > 0.5, 3)
    for p in range(3):
        alone = (majority_at_k(scores[[p]], answers[[p]], 3, 50, 1), best_at_k(scores[[p]], 3),
                 pass_at_k(scores[[p]] > 0.5, 3))
        assert [float(one[0]) for one in alone] == pytest.approx([float(all_[p]) for all_ in together])


def test_intervals_hold_the_mean_narrow_with_prompts_and_repeat_with_a_seed():
    rng = np.random.default_rng(5)
    few, many = rng.random((2, 30)), rng.random((2, 3000))
    (low, high), (low_many, high_many) = interval(few, 0.95, 1000, 1), interval(many, 0.95, 300, 1)
    assert np.all(low < few.mean(1)) and np.all(few.mean(1) < high)
    # The normal approximation of the same interval: mean ± 1.96 σ/√P.
    half = 1.96 * few.std(axis=1) / np.sqrt(30)
    np.testing.assert_allclose(low, few.mean(1) - half, atol=0.02)
    np.testing.assert_allclose(high, few.mean(1) + half, atol=0.02)
    assert np.all(high_many - low_many < (high - low) / 5)
    np.testing.assert_array_equal(interval(few, 0.95, 1000, 1), (low, high))
    assert np.all(interval(few, 0.5, 1000, 1)[0] > low)
    np.testing.assert_array_equal(interval([[0.25]], 0.95, 10, 1), ([0.25], [0.25]))


@pytest.mark.parametrize("call, message", [
    (lambda: pass_at_k([[True, False]], 3), "pass@3 has no unbiased estimate from 2 samples"),
    (lambda: best_at_k([1.0, 2.0], 1), r"must be \[prompts, samples\], not \[2\]"),
    (lambda: best_at_k([[1.0]], 0), "k = 0")])
def test_what_cannot_be_estimated_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
