"""Rank order, layer split and vocabulary padding against numbers written by hand."""
from __future__ import annotations

import pytest

from mrl.reshard import Coord, Layout, layer_range


def test_rank_order_is_megatrons_default():
    layout = Layout(tp=2, pp=2, dp=2)
    order = [(0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1), (0, 1, 0), (1, 1, 0), (0, 1, 1), (1, 1, 1)]
    assert layout.world == 8
    for rank, (tp, pp, dp) in enumerate(order):
        assert layout.coord(rank) == Coord(tp=tp, pp=pp, dp=dp)
        assert layout.rank(layout.coord(rank)) == rank


def test_a_stage_is_sent_by_its_first_rank():
    assert [Layout(tp=2, pp=3, dp=4).sender(stage) for stage in range(3)] == [0, 8, 16]


@pytest.mark.parametrize("rank", [-1, 8])
def test_rank_outside_the_layout(rank):
    with pytest.raises(ValueError, match=f"rank {rank} is not in 0…7"):
        Layout(tp=2, pp=2, dp=2).coord(rank)


def test_sizes_must_be_positive():
    with pytest.raises(ValueError, match="tp is 0"):
        Layout(tp=0)


@pytest.mark.parametrize("vocab, tp, padded", [
    (151936, 8, 152576), (151936, 4, 152064), (151936, 1, 151936), (1, 1, 128), (128, 1, 128), (129, 2, 256),
])
def test_padded_vocab(vocab, tp, padded):
    assert Layout(tp=tp).padded_vocab(vocab) == padded


def test_layers_are_split_evenly_and_in_order():
    assert [list(layer_range(6, 3, stage)) for stage in range(3)] == [[0, 1], [2, 3], [4, 5]]


def test_uneven_split_is_refused():
    with pytest.raises(ValueError, match="5 layers do not divide over pp 2"):
        layer_range(5, 2, 0)
