"""Copies that are joined, cut and grouped copy exactly what the pairs said."""
import pytest
import torch

from mrl.receiver.mrl_receiver import copies
from mrl.receiver.mrl_receiver.copies import Copies


def flats(numel: int, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """A source of which no two elements are equal, and a target of zeros."""
    return torch.arange(1, numel + 1).to(dtype), torch.zeros(numel, dtype=dtype)


@pytest.mark.parametrize("alone_bytes", [1 << 20, 16])
def test_neighbours_become_one_copy_and_others_stay_apart(monkeypatch, alone_bytes):
    monkeypatch.setattr(copies, "ALONE_BYTES", alone_bytes)
    source, target = flats(24)
    stacked = target[:18].view(3, 2, 3)  # experts' gate and up, in two tensors each on the way
    pairs = [(source[3 * i:3 * i + 3], stacked[i // 2, i % 2]) for i in range(6)]
    pairs += [(source[18:20], target[22:24]), (source[20:22], target[20:22])]
    made = Copies(pairs)
    assert made.count == 3 and len(made.alone) == (alone_bytes == 16)
    made.run()
    assert target.tolist() == [*range(1, 19), 0, 0, 21, 22, 19, 20]
    source.neg_()  # values change, memory stays
    made.run()
    assert target[:3].tolist() == [-1, -2, -3]


def test_neighbours_in_different_memory_or_of_different_dtypes_are_not_joined():
    source, target = flats(4)
    elsewhere, wide = torch.zeros(4), torch.zeros(8, dtype=torch.float64)
    made = Copies([(source[:2], elsewhere[:2]), (source[2:], target[2:]), (source[:2], wide[:2]),
                   (source[2:], wide[2:4])])
    assert made.count == 4
    made.run()
    assert elsewhere.tolist() == [1, 2, 0, 0] and target.tolist() == [0, 0, 3, 4] and wide[:4].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("slab_bytes, count", [(8 * 4, 3), (8 * 4 + 1, 1)])
def test_large_slabs_are_copied_by_themselves_and_small_ones_with_the_whole(monkeypatch, slab_bytes, count):
    monkeypatch.setattr(copies, "SLAB_BYTES", slab_bytes)
    source, target = flats(3 * 5 * 4)
    heads = source.view(3, 5, 4)[:, 1:3]  # as a query lies among keys and values
    made = Copies([(heads, target[:24].view(3, 2, 4))])
    assert made.count == count
    made.run()
    assert torch.equal(target[:24].view(3, 2, 4), heads) and not target[24:].any()


def test_parameters_scalars_and_nothing_at_all():
    parameter, source = torch.nn.Parameter(torch.zeros(2)), torch.ones(2)
    made = Copies([(source, parameter), (torch.tensor(7.0), (scalar := torch.zeros(())))])
    made.run()
    assert parameter.tolist() == [1, 1] and scalar.item() == 7
    assert Copies([]).count == 0
    Copies([]).run()


def test_a_transposed_source_is_copied_as_it_is():
    source, target = flats(6)
    made = Copies([(source.view(2, 3).t(), target.view(3, 2))])
    made.run()
    assert target.tolist() == [1, 4, 2, 5, 3, 6]
