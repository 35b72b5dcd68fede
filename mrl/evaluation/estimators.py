"""Estimates of what k samples of a prompt are worth, from the n that were drawn. Pure functions, numpy, float64.

Scores are arrays [P, n]: P prompts with n samples each. Every estimator gives one number a prompt, [P]; the result of a
data set is their mean, and `interval` says how far another choice of prompts could have moved it.
"""
from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def subset_sizes(n: int) -> list[int]:
    """The k that results of n samples are given for: powers of 2 below n, and n itself; none for a single sample."""
    return [] if n < 2 else [2 ** power for power in range(1, (n - 1).bit_length())] + [n]


def pass_at_k(correct: ArrayLike, k: int) -> Floats:
    """Probability that at least one of k samples is correct, unbiased: 1 - C(n - c, k) / C(n, k).

    The k are drawn without replacement from the n there are, c of them correct (Chen et al. 2021, "Evaluating Large
    Language Models Trained on Code").

    Args:
        correct: bool [P, n].
        k: 1 to n, else ValueError.
    """
    correct = np.asarray(correct, bool)
    n = _samples(correct, k)
    if k > n:
        raise ValueError(f"pass@{k} has no unbiased estimate from {n} samples of a prompt: draw {k} or more")
    wrong = n - correct.sum(axis=1, keepdims=True)
    drawn = np.arange(k)
    return 1.0 - ((wrong - drawn).clip(min=0) / (n - drawn)).prod(axis=1)


def best_at_k(scores: ArrayLike, k: int) -> Floats:
    """Expected best score of k samples drawn with replacement from the n there are.

    It is the exact value of what verl's `best@k/mean` estimates with 1000 random resamples: the i-th smallest score is
    the best with probability (i/n)^k - ((i-1)/n)^k.

    Args:
        scores: float [P, n].
        k: at least 1, else ValueError.
    """
    scores = np.asarray(scores, np.float64)
    n = _samples(scores, k)
    return np.sort(scores, axis=1) @ np.diff((np.arange(n + 1) / n) ** k)


def majority_at_k(scores: ArrayLike, answers: ArrayLike, k: int, resamples: int, seed: int) -> Floats:
    """Expected score of the answer that k samples give most often (Wang et al. 2022, "Self-Consistency").

    As verl computes `maj@k/mean`: the mean over `resamples` random draws of k samples with replacement, the same draws
    for every prompt. In each, the most frequent answer wins, the one drawn first on a tie, and scores what its first
    drawn sample scores. A sample without an answer votes too, for having none.

    Args:
        scores: float [P, n].
        answers: int [P, n]; equal numbers are equal answers. They are compared within a prompt only.
        k: at least 1, else ValueError.
    """
    scores, answers = np.asarray(scores, np.float64), np.asarray(answers)
    draws = np.random.default_rng(seed).integers(_samples(scores, k), size=(resamples, k))
    values = np.empty(len(scores))
    for prompt, (own, votes) in enumerate(zip(scores, answers[:, draws])):
        supporters = (votes[:, :, None] == votes[:, None, :]).sum(axis=2)
        winner = supporters.argmax(axis=1)  # the first of several
        values[prompt] = own[draws[np.arange(resamples), winner]].mean()
    return values


def interval(values: ArrayLike, confidence: float, resamples: int, seed: int) -> tuple[Floats, Floats]:
    """Percentile bootstrap interval of means over prompts (Efron 1979): (low, high), each [M].

    Prompts are resampled, not samples, so it covers the choice of prompts and the sampling of responses together.

    Args:
        values: float [M, P]: M results of each of the same P prompts.
        confidence: share of the resampled means between the two, 0 to 1.
    """
    values = np.asarray(values, np.float64)
    rng, prompts = np.random.default_rng(seed), values.shape[1]
    means = np.stack([values[:, rng.integers(prompts, size=prompts)].mean(axis=1) for _ in range(resamples)])
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
    return low, high


def _samples(values: NDArray, k: int) -> int:
    """n of an array [P, n]. ValueError for another shape or k < 1."""
    if values.ndim != 2 or values.shape[1] < 1:
        raise ValueError(f"scores must be [prompts, samples], not {list(values.shape)}")
    if k < 1:
        raise ValueError(f"k = {k}: give 1 or more samples")
    return values.shape[1]
