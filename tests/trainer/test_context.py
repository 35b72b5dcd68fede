"""Which tokens a context-parallel rank holds."""
import pytest
import torch

from mrl.trainer.context import rows_of


def test_the_chunks_of_each_sequence_are_paired_from_both_ends():
    starts = torch.tensor([0, 4, 12], dtype=torch.int32)
    assert rows_of(starts, 12, cp=2, rank=0).tolist() == [0, 3, 4, 5, 10, 11]
    assert rows_of(starts, 12, cp=2, rank=1).tolist() == [1, 2, 6, 7, 8, 9]


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_every_token_is_on_one_rank_and_causal_work_is_even(cp):
    lengths = [2 * cp * n for n in (1, 5, 2)]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    shares = [rows_of(starts, sum(lengths), cp, rank) for rank in range(cp)]
    assert sorted(torch.cat(shares).tolist()) == list(range(sum(lengths)))
    position = torch.cat([torch.arange(1, length + 1) for length in lengths])
    assert len({int(position[share].sum()) for share in shares}) == 1
