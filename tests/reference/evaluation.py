"""Results of an evaluation as their definitions say, by enumeration and exact fractions, one prompt at a time."""
from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import combinations, product


def pass_at_k(correct: list[bool], k: int) -> float:
    """The share of all choices of k samples that hold a correct one."""
    choices = list(combinations(correct, k))
    return float(Fraction(sum(any(choice) for choice in choices), len(choices)))


def best_at_k(scores: list[float], k: int) -> float:
    """The mean, over all sequences of k samples with repetition, of the best score."""
    sequences = list(product(scores, repeat=k))
    return float(sum(Fraction(max(sequence)) for sequence in sequences) / len(sequences))


def majority_of(sequence: list[tuple[int, float]]) -> float:
    """Score of the most frequent answer of (answer, score) pairs: the first pair that has it; first come on a tie."""
    counts = Counter(answer for answer, _ in sequence)
    most = max(counts.values())
    winner = next(answer for answer, _ in sequence if counts[answer] == most)
    return next(score for answer, score in sequence if answer == winner)


def majority_at_k(samples: list[tuple[int, float]], k: int) -> float:
    """The mean of `majority_of` over all sequences of k samples with repetition."""
    sequences = list(product(samples, repeat=k))
    return float(sum(Fraction(majority_of(list(sequence))) for sequence in sequences) / len(sequences))
