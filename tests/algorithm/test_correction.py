"""Importance weights between trainer and engine against values worked out by hand."""
import pytest
import torch

from mrl.algorithm.correction import effective_share, importance
from mrl.algorithm.numeric import sequence_sum
from mrl.config.algorithm import Correction

TRAINER, ENGINE = torch.tensor([0.5, 0.25, 0.75, 0.9]).log(), torch.tensor([0.5, 0.5, 0.5, 0.5]).log()
SEQUENCE = torch.tensor([1, 0, 1, 0])


def weights(**correction):
    old = TRAINER.clone().requires_grad_()
    found = importance(old, ENGINE, SEQUENCE, Correction(**correction))
    assert not found.weight.requires_grad
    return found.weight.tolist(), found.raw.tolist(), found.cut.tolist()


def test_truncated():
    weight, raw, cut = weights(cap=1.6)
    assert raw == pytest.approx([1.0, 0.5, 1.5, 1.8]) and weight == pytest.approx([1.0, 0.5, 1.5, 1.6])
    assert cut == [False, False, False, True]
    assert weights(cap=1.6, floor=0.75)[0] == pytest.approx([1.0, 0.75, 1.5, 1.6])


def test_masked():
    weight, raw, cut = weights(kind="mask", cap=1.6, floor=0.75)
    assert weight == pytest.approx([1.0, 0.0, 1.5, 0.0]) and cut == [False, True, False, True]
    assert raw == pytest.approx([1.0, 0.5, 1.5, 1.8])


def test_of_whole_sequences():
    weight, raw, cut = weights(level="sequence", cap=1.2)
    assert raw == pytest.approx([1.5, 0.9, 1.5, 0.9]) and weight == pytest.approx([1.2, 0.9, 1.2, 0.9])
    assert weights(level="sequence", kind="mask", cap=1.2)[0] == pytest.approx([0.0, 0.9, 0.0, 0.9])
    assert cut == [True, False, True, False]


def test_nothing_overflows():
    found = importance(torch.zeros(3), torch.full((3,), -1e4), torch.zeros(3).long(),
                       Correction(level="sequence", cap=2.0))
    assert found.weight.tolist() == [2.0] * 3 and torch.isfinite(found.raw).all()


def test_effective_share():
    assert effective_share(1.0, 1.0) == 1.0
    assert effective_share(0.5, 0.5) == 0.5  # weights 1 and 0
    assert effective_share(0.0, 0.0) == 0.0


def test_sums_over_sequences_are_where_their_tokens_are():
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert sequence_sum(values, SEQUENCE).tolist() == [4.0, 6.0, 4.0, 6.0]
    assert sequence_sum(torch.zeros(0), torch.zeros(0).long()).shape == (0,)
    many = torch.full((100_000,), 0.1)
    assert sequence_sum(many, torch.zeros(100_000).long())[0].item() == pytest.approx(10_000, rel=1e-6)
