"""The checksum sees what a plain sum does not, and adds up over shards."""
import pytest
import torch

from mrl.receiver.mrl_receiver import checksum as module
from mrl.receiver.mrl_receiver.checksum import add, checksum, whole


def lattice_of(view: torch.Tensor, base: torch.Tensor):
    return view.storage_offset() - base.storage_offset(), tuple(view.shape), tuple(view.stride())


def test_hand_derived_values():
    values = torch.tensor([3, -1, 2], dtype=torch.int32)
    assert checksum(values, whole((3,))) == 3 * 1 + -1 * 3 + 2 * 5
    ones = torch.tensor([1.0, 1.0])  # bits 0x3f800000
    assert checksum(ones, whole((2,))) == 0x3F800000 * (1 + 3)
    halves = torch.tensor([1.0, 1.0], dtype=torch.bfloat16)  # bits 0x3f80
    assert checksum(halves, whole((2,))) == 0x3F80 * 4


def test_wraps_around_like_a_64_bit_integer():
    big = torch.full((4,), 2**62, dtype=torch.int64)
    assert checksum(big, whole((4,))) == 0  # 2^62 * (1+3+5+7) = 2^66
    assert add(2**63 - 1, 1) == -2**63


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_add_up_to_the_whole(dtype):
    tensor = torch.randn(12, 10).to(dtype)
    rows = [tensor[:5], tensor[5:]]
    columns = [tensor[:, :3], tensor[:, 3:]]
    for shards in (rows, columns):
        total = 0
        for shard in shards:
            total = add(total, checksum(shard.clone(), lattice_of(shard, tensor)))
        assert total == checksum(tensor, whole((12, 10)))


def test_chunking_does_not_change_it(monkeypatch):
    tensor = torch.randn(7, 3, 5)
    expected = checksum(tensor, whole((7, 3, 5)))
    for chunk in (1, 4, 16, 50):
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk)
        assert checksum(tensor, whole((7, 3, 5))) == expected


def test_sees_a_transpose_swapped_rows_and_one_bit():
    tensor = torch.randn(6, 6)
    sums = {checksum(t, whole((6, 6))) for t in (tensor, tensor.T, tensor.flip(0), tensor.roll(1, 1))}
    assert len(sums) == 4
    other = tensor.clone()
    other.view(torch.int32)[3, 2] ^= 1
    assert checksum(other, whole((6, 6))) != checksum(tensor, whole((6, 6)))
