"""Every way of cutting, against hand-made integers: row r of q, k, v is 100+r, 200+r, 300+r."""
from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mrl.reshard import Layout
from mrl.reshard.pieces import HfTensor, gate_up, qkv, replicated, row, vocab

WIDTH = 3


def rows(first: int, count: int, weight: bool) -> torch.Tensor:
    """Bias [first, first+1, …], or a weight of WIDTH columns whose row values are 10 * that + column."""
    bias = torch.arange(first, first + count)
    return bias[:, None] * 10 + torch.arange(WIDTH) if weight else bias


def cut(kind, tensors: dict[str, torch.Tensor], layout: Layout, rank: int, **sizes: int) -> torch.Tensor:
    """The shard of `rank`, filled piece by piece; -1 where no piece reaches."""
    names = [HfTensor(name, tuple(tensor.shape)) for name, tensor in tensors.items()]
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
