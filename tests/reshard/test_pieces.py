"""Every way of cutting, against hand-made integers: row r of q, k, v is 100+r, 200+r, 300+r."""
from __future__ import annotations

from itertools import combinations, product
from math import prod
from types import SimpleNamespace

import pytest
import torch

from mrl.reshard import Layout
from mrl.reshard.pieces import (
    HfTensor, Piece, alternating_gate_up, column, gate_up, joined_gate_up, qkv, replicated, row, slices, stacked,
    transposed, vocab,
)

WIDTH = 3


def rows(first: int, count: int, weight: bool) -> torch.Tensor:
    """Bias [first, first+1, …], or a weight of WIDTH columns whose row values are 10 * that + column."""
    bias = torch.arange(first, first + count)
    return bias[:, None] * 10 + torch.arange(WIDTH) if weight else bias


def cut(kind, tensors: dict[str, torch.Tensor], layout: Layout, rank: int, expert: int = 0, **sizes: int):
    """The shard of `rank`, filled piece by piece; -1 where no piece reaches."""
    names = [HfTensor(name, tuple(tensor.shape), expert) for name, tensor in tensors.items()]
    shard = kind(names, SimpleNamespace(**sizes), layout, rank)
    local = torch.full(shard.shape, -1)
    for piece in shard.pieces:
        assert piece.hf_shape == tuple(tensors[piece.hf].shape)
        target = piece.of_local(local)
        assert (target == -1).all(), "written twice"
        target.copy_(piece.of_hf(tensors[piece.hf]))
    return local


def first_columns(shard: torch.Tensor, weight: bool) -> list[int]:
    if weight:
        assert (shard[:, 1:] - shard[:, :1] == torch.arange(1, WIDTH)).all()
        shard = shard[:, 0] // 10
    return shard.tolist()


QKV_CASES = {
    "MHA": (2, 2, 2, [[100, 101, 200, 201, 300, 301, 102, 103, 202, 203, 302, 303]]),
    "MHA, tp 2": (2, 2, 2, [[100, 101, 200, 201, 300, 301], [102, 103, 202, 203, 302, 303]]),
    "GQA": (4, 2, 2, [[100, 101, 102, 103, 200, 201, 300, 301, 104, 105, 106, 107, 202, 203, 302, 303]]),
    "GQA, tp 2": (4, 2, 2, [[100, 101, 102, 103, 200, 201, 300, 301], [104, 105, 106, 107, 202, 203, 302, 303]]),
    "MHA, two groups a rank": (4, 4, 1, [[100, 200, 300, 101, 201, 301], [102, 202, 302, 103, 203, 303]]),
    "GQA, two ranks a group": (4, 2, 2, [[100, 101, 102, 103], [200, 201, 300, 301],
                                         [104, 105, 106, 107], [202, 203, 302, 303]]),
    "MQA": (3, 1, 2, [[100, 101, 102, 103, 104, 105, 200, 201, 300, 301]]),
    "MQA, cut inside heads": (4, 1, 2, [[100, 101, 102], [103, 104, 105], [106, 107, 200], [201, 300, 301]]),
}


@pytest.mark.parametrize("weight", [True, False], ids=["weight", "bias"])
@pytest.mark.parametrize("heads, kv_heads, head_dim, expected", QKV_CASES.values(), ids=QKV_CASES.keys())
def test_qkv(heads, kv_heads, head_dim, expected, weight):
    tensors = {
        "q": rows(100, heads * head_dim, weight),
        "k": rows(200, kv_heads * head_dim, weight),
        "v": rows(300, kv_heads * head_dim, weight),
    }
    layout = Layout(tp=len(expected))
    for rank, wanted in enumerate(expected):
        shard = cut(qkv, tensors, layout, rank, kv_heads=kv_heads)
        assert first_columns(shard, weight) == wanted


def test_gate_up_is_stacked_per_rank():
    tensors = {"gate": rows(100, 4, True), "up": rows(200, 4, True)}
    shards = [first_columns(cut(gate_up, tensors, Layout(tp=2), rank), True) for rank in range(2)]
    assert shards == [[100, 101, 200, 201], [102, 103, 202, 203]]


def test_gate_and_up_in_one_tensor():
    fused = {"gate_up": torch.cat([rows(100, 4, True), rows(200, 4, True)])}
    shards = [first_columns(cut(joined_gate_up, fused, Layout(tp=2), rank), True) for rank in range(2)]
    assert shards == [[100, 101, 200, 201], [102, 103, 202, 203]]


@pytest.mark.parametrize("weight", [True, False], ids=["weight", "bias"])
def test_gate_and_up_in_turns(weight):
    fused = {"gate_up": torch.stack([rows(100, 4, weight), rows(200, 4, weight)], dim=1).flatten(0, 1)}
    assert first_columns(fused["gate_up"], weight) == [100, 200, 101, 201, 102, 202, 103, 203]
    shards = [first_columns(cut(alternating_gate_up, fused, Layout(tp=2), rank), weight) for rank in range(2)]
    assert shards == [[100, 101, 200, 201], [102, 103, 202, 203]]


def test_column_parallel_splits_the_rows():
    shards = [first_columns(cut(column, {"q_b": rows(100, 4, True)}, Layout(tp=2), rank), True) for rank in range(2)]
    assert shards == [[100, 101], [102, 103]]


def test_transposed_tensors():
    down = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]])  # 4 inputs, 3 outputs
    shards = [cut(transposed(row), {"down": down}, Layout(tp=2), rank).tolist() for rank in range(2)]
    assert shards == [[[0, 3], [1, 4], [2, 5]], [[6, 9], [7, 10], [8, 11]]]


def test_stacked_experts():
    bias = {"bias": torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]])}  # of 2 experts: gate, up, gate, up
    assert cut(stacked(alternating_gate_up), bias, Layout(), 0, expert=1).tolist() == [4, 6, 5, 7]
    weight = {"weight": torch.arange(24).view(2, 3, 4)}  # of 2 experts: 3 inputs, 4 outputs
    assert cut(stacked(transposed(alternating_gate_up)), weight, Layout(tp=2), 1, expert=1).tolist() == [
        [14, 18, 22], [15, 19, 23],
    ]
    assert cut(stacked(transposed(row)), weight, Layout(tp=3), 2, expert=0).tolist() == [[8], [9], [10], [11]]


CUT = {
    # kind, HF tensors, shape of each; the most pieces that a box leaves of one, the boxes of one in its shard
    "row": (row, 1, (4, 6), 1, 1),
    "joined": (joined_gate_up, 1, (8, 3), 1, 1),
    "qkv": (qkv, 3, (12, 2), 3, 2),
    "alternating": (alternating_gate_up, 1, (8, 3), 3, 2),
    "stacked alternating": (stacked(transposed(alternating_gate_up)), 1, (2, 3, 8), 3, 2),
    "stacked row": (stacked(transposed(row)), 1, (2, 4, 3), 1, 1),
}


def last_piece(name: str) -> Piece:
    """Of rank 1 of two."""
    kind, tensors, shape, *_ = CUT[name]
    (*_, piece) = kind([HfTensor("t", shape, 1)] * tensors, SimpleNamespace(kv_heads=4), Layout(tp=2), 1).pieces
    return piece


@pytest.mark.parametrize("name", CUT)
def test_what_a_box_leaves_of_a_piece(name):
    """Every box of the tensor: the clipped pieces fill exactly what the whole piece fills from inside the box."""
    (_, _, shape, most, _), piece = CUT[name], last_piece(name)
    tensor = torch.arange(prod(shape)).view(shape)
    whole = torch.full(piece.local_view, -1)
    piece.of_local(whole).copy_(piece.of_hf(tensor))
    for box in product(*([(a, b) for a, b in combinations(range(size + 1), 2)] for size in shape)):
        inside = torch.zeros(shape, dtype=torch.bool)
        inside[slices(box)] = True
        found, clipped = torch.full(piece.local_view, -1), piece.clipped(box)
        for part in clipped:
            assert (part.of_local(found) == -1).all() and part.leaves == piece.leaves
            assert all(low <= a < b <= high for (a, b), (low, high) in zip(part.hf_index, box))
            part.of_local(found).copy_(part.of_hf(tensor))
        expected = torch.full(piece.local_view, -1)
        piece.of_local(expected).copy_(piece.of_hf(torch.where(inside, tensor, -1)))
        assert torch.equal(found, expected) and len(clipped) <= most


@pytest.mark.parametrize("name", CUT)
def test_the_boxes_in_which_a_piece_lies_in_its_shard(name):
    (_, _, shape, _, expected), piece = CUT[name], last_piece(name)
    tensor = torch.arange(prod(shape)).view(shape)
    shard = torch.full(piece.local_view, -1)
    piece.of_local(shard).copy_(piece.of_hf(tensor))
    for clipped in (piece, *piece.clipped(tuple((size // 4, size) for size in shape))):
        boxes = clipped.boxes(shard, most=expected)
        found = torch.full(shape, -1)
        for box, values in boxes:
            assert (found[slices(box)] == -1).all() and values.data_ptr() and values.untyped_storage()._cdata == (
                shard.untyped_storage()._cdata)
            found[slices(box)] = values
        inside = torch.full(shape, -1)
        inside[slices(clipped.hf_index)] = tensor[slices(clipped.hf_index)]
        assert torch.equal(found, inside) and (clipped is not piece or len(boxes) == expected)
    assert expected == 1 or piece.boxes(shard, most=expected - 1) is None


def test_row_parallel_splits_the_columns():
    weight = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]])
    shards = [cut(row, {"down": weight}, Layout(tp=2), rank).tolist() for rank in range(2)]
    assert shards == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_vocabulary_padding_is_touched_by_no_piece():
    weight = rows(100, 5, True)  # 5 rows, padded to 12 over 3 ranks
    layout = Layout(tp=3, vocab_multiple=4)
    shards = [cut(vocab, {"embedding": weight}, layout, rank) for rank in range(3)]
    assert [shard[:, 0].tolist() for shard in shards] == [[1000, 1010, 1020, 1030], [1040, -1, -1, -1], [-1] * 4]


def test_replicated_tensors_leave_once():
    tensor = HfTensor("norm", (3,))
    leaves = [replicated([tensor], None, Layout(tp=2), rank).pieces[0].leaves for rank in range(2)]
    assert leaves == [True, False]


def test_a_size_that_does_not_divide_names_the_tensor():
    with pytest.raises(ValueError, match=r"down \(2, 5\): 5 does not divide over tp 2"):
        row([HfTensor("down", (2, 5))], None, Layout(tp=2), 0)
