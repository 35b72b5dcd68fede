"""Rank order, layer split and vocabulary padding against numbers written by hand."""
from __future__ import annotations

import pytest

from mrl.reshard import Coord, ExpertCoord, Layout, expert_range


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
    assert [list(Layout(pp=3).layers(6, stage)) for stage in range(3)] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("layout, layers", [  # of every chunk of every stage
    (Layout(pp=2, vpp=2), [["0 1", "4 5"], ["2 3", "6 7"]]),
    (Layout(pp=2, vpp=4), [["0", "2", "4", "6"], ["1", "3", "5", "7"]]),
    (Layout(pp=3, first_stage_layers=2), [["0 1"], ["2 3 4"], ["5 6 7"]]),
    (Layout(pp=3, first_stage_layers=1, last_stage_layers=3), [["0"], ["1 2 3 4"], ["5 6 7"]]),
    (Layout(pp=2, vpp=2, last_stage_layers=2), [["0 1 2", "4 5 6"], ["3", "7"]]),
], ids=str)
def test_chunks_and_uneven_stages(layout, layers):
    for stage, chunks in enumerate(layers):
        found = [" ".join(map(str, layout.layers(8, stage, chunk))) for chunk in range(layout.vpp)]
        assert found == chunks


@pytest.mark.parametrize("layout, message", [
    (Layout(pp=2), "pp 2 does not divide num_hidden_layers 9"),
    (Layout(pp=3, vpp=2), "vpp 2 does not divide the 3 layers of a stage"),
    (Layout(pp=2, vpp=2, first_stage_layers=4), "vpp 2 does not divide the 5 layers of a stage"),
    (Layout(vpp=2), "vpp 2 needs pp of at least 2"),
    (Layout(last_stage_layers=2), "last_stage_layers 2 needs pp of at least 2"),
    (Layout(pp=2, first_stage_layers=9), "0 layers, what first_stage_layers 9 leave of num_hidden_layers 9, do not"),
    (Layout(pp=4, first_stage_layers=3, last_stage_layers=1), "5 layers, what .* do not divide over the other 2 of pp"),
    (Layout(pp=2, first_stage_layers=4, last_stage_layers=5), "say the same: give one of them"),
], ids=str)
def test_layers_that_do_not_divide(layout, message):
    with pytest.raises(ValueError, match=message):
        layout.layers(9, 0)


@pytest.mark.parametrize("layout, places", [  # (ep, etp, repetition) of the ranks of the last stage, in order
    (Layout(tp=2, pp=2, dp=4, ep=2, etp=2),
     [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0), (0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 1)]),
    (Layout(tp=4, pp=3, ep=2), [(0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1)]),
    (Layout(tp=1, dp=4, ep=2, etp=2), [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]),
    (Layout(tp=2, dp=2), [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 0, 3)]),
], ids=str)
def test_places_among_experts(layout, places):
    ranks = range(layout.world - len(places), layout.world)
    assert [layout.expert_coord(layout.coord(rank)) for rank in ranks] == [
        ExpertCoord(ep=ep, etp=etp, dp=dp) for ep, etp, dp in places
    ]


def test_experts_need_a_whole_number_of_ranks():
    with pytest.raises(ValueError, match=r"tp 2 \* dp 3 = 6 ranks a stage are not a multiple of ep 2 \* etp 2"):
        Layout(tp=2, dp=3, ep=2, etp=2)


def test_experts_are_dealt_out_in_blocks():
    assert [list(expert_range(8, 4, rank)) for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(ValueError, match="8 experts do not divide over ep 3"):
        expert_range(8, 3, 0)
