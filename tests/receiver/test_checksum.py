"""The checksum sees what a plain sum does not, and adds up over shards."""
import pytest
import torch

from mrl.receiver.mrl_receiver import checksum as module
from mrl.receiver.mrl_receiver.checksum import add, checksum, checksums, whole


def lattice_of(view: torch.Tensor, base: torch.Tensor):
    return view.storage_offset() - base.storage_offset(), tuple(view.shape), tuple(view.stride())


def naive(values: torch.Tensor, lattice) -> int:
    """The definition, element by element, in Python's integers."""
    start, shape, strides = lattice
    size = values.element_size()
    lanes, total = 8 // size, 0
    raw = values.contiguous().view(-1).view(torch.uint8).tolist()
    places = torch.zeros(shape, dtype=torch.int64) + start
    for dimension, (length, stride) in enumerate(zip(shape, strides)):
        places += (torch.arange(length) * stride).view(-1, *[1] * (len(shape) - dimension - 1))
    for position, place in enumerate(places.flatten().tolist()):
        bits = int.from_bytes(bytes(raw[position * size:(position + 1) * size]), "little")
        total += (bits << (8 * size * (place % lanes))) * (2 * (place // lanes) + 1)
    return add(total % 2**64, 0)


def test_hand_derived_values():
    values = torch.tensor([3, 5, 2], dtype=torch.int64)
    assert checksum(values, whole((3,))) == 3 * 1 + 5 * 3 + 2 * 5
    ones = torch.tensor([1.0, 1.0, 1.0])  # bits 0x3f800000: two to a word
    assert checksum(ones, whole((3,))) == 0x3F800000 + (0x3F800000 << 32) + 0x3F800000 * 3
    minus = torch.tensor([-1], dtype=torch.int16)  # counts as 0xffff
    assert checksum(minus, whole((1,))) == 0xFFFF


def test_wraps_around_like_a_64_bit_integer():
    big = torch.full((4,), 2**62, dtype=torch.int64)
    assert checksum(big, whole((4,))) == 0  # 2^62 * (1+3+5+7) = 2^66
    assert add(2**63 - 1, 1) == -2**63


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("shape", [(), (1,), (9000,), (16384,), (5, 16), (5, 7), (3, 4, 8), (2, 3, 5)])
def test_words_and_single_elements_give_what_the_definition_says(dtype, shape):
    tensor = (torch.randn(shape) * 100).to(dtype)
    assert checksum(tensor, whole(shape)) == naive(tensor, whole(shape))
    if tensor.dim() == 2:  # memory that cannot be read in words as it is
        turned = tensor.T.contiguous().T
        assert checksum(turned, whole(shape)) == naive(tensor, whole(shape))


def test_many_blocks_at_once_give_each_its_own():
    tensors = [torch.randn(4, 8), torch.empty(0, 8), torch.randn(3).bfloat16(), torch.randn(2, 2, 2)]
    blocks = [(tensor, whole(tuple(tensor.shape))) for tensor in tensors]
    assert checksums(iter(blocks)) == [naive(*block) for block in blocks]
    assert checksums([]) == []
    with pytest.raises(ValueError, match="not the lattice's"):
        checksums([(tensors[0], whole((8, 4)))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_add_up_to_the_whole(dtype):
    tensor = torch.randn(12, 40).to(dtype)
    rows = [tensor[:5], tensor[5:]]
    columns, split_words = [tensor[:, :12], tensor[:, 12:]], [tensor[:, :3], tensor[:, 3:]]
    for shards in (rows, columns, split_words):
        total = 0
        for shard in shards:
            total = add(total, checksum(shard.clone(), lattice_of(shard, tensor)))
        assert total == checksum(tensor, whole((12, 40)))


def test_chunking_does_not_change_it(monkeypatch):
    tensor = torch.randn(7, 3, 5)
    turned = torch.randn(6, 8).T
    expected = [checksum(one, whole(tuple(one.shape))) for one in (tensor, turned)]
    for chunk in (1, 4, 16, 50):
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk)
        assert [checksum(one, whole(tuple(one.shape))) for one in (tensor, turned)] == expected


def test_sees_a_transpose_swapped_rows_and_one_bit():
    tensor = torch.randn(6, 6)
    sums = {checksum(t, whole((6, 6))) for t in (tensor, tensor.T, tensor.flip(0), tensor.roll(1, 1))}
    assert len(sums) == 4
    other = tensor.clone()
    other.view(torch.int32)[3, 2] ^= 1
    assert checksum(other, whole((6, 6))) != checksum(tensor, whole((6, 6)))
