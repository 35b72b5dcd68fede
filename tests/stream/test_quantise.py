"""Blockwise fp8 against what one would write down block by block, and what comes back of the weights."""
import pytest
import torch

from mrl.stream import quantise as module
from mrl.stream.quantise import quantise


def made(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.full(weights.shape, 9.0).to(torch.float8_e4m3fn)
    scales = torch.full([-(-size // 128) for size in weights.shape], 9.0)
    quantise(weights, values, scales)
    return values, scales


def naive(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One block at a time, in float32."""
    values = torch.empty(weights.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty([-(-size // 128) for size in weights.shape])
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            inside = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            block = weights[inside].float()
            scales[row, column] = max(block.abs().max() / torch.tensor(448.0), torch.tensor(2.0 ** -126))
            values[inside] = (block / scales[row, column]).to(torch.float8_e4m3fn)
    return values, scales


def restored(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """As DeepSeek-V3 publishes it: value times scale."""
    rows, columns = values.shape
    return values.float() * scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (1, 1), (130, 300), (576, 70), (100, 513)])
def test_every_bit_is_what_block_by_block_gives_and_weights_come_back(shape, dtype, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 128 * 200)  # several chunks, each of several rows of blocks
    weights = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.02).to(dtype)
    values, scales = made(weights)
    for one, other in zip((values, scales), naive(weights)):
        assert torch.equal(bits(one), bits(other))
    assert values.float().abs().max() == 448
    error = (restored(values, scales) - weights.float()).abs()
    scale = restored(torch.ones(shape).to(torch.float8_e4m3fn), scales)
    assert (error <= torch.maximum(weights.float().abs() / 16, scale / 1024) * 1.0001).all()


def test_views_with_gaps_are_read_and_written_in_place():
    weights, scales = torch.randn(300, 200)[::2], torch.ones(2, 5)
    values = torch.zeros(150, 400).to(torch.float8_e4m3fn)
    quantise(weights, values[:, ::2], scales[:, 1::2])
    expected = made(weights.contiguous())
    assert torch.equal(bits(values[:, ::2]), bits(expected[0])) and torch.equal(scales[:, 1::2], expected[1])
    assert not values[:, 1::2].float().any() and (scales[:, ::2] == 1).all()


def test_blocks_of_zeros_and_of_almost_nothing_and_huge_ones_keep_their_values():
    weights = torch.zeros(128, 6 * 128)
    for block, value in enumerate([0.0, 1e-45, 3e-38, 1e-30, 3e38, -3e38]):
        weights[5, block * 128 + 7] = value
    values, scales = made(weights)
    assert (scales > 0).all() and scales.isfinite().all() and scales[0, 0] == torch.finfo(torch.float32).tiny
    assert torch.allclose(restored(values, scales), weights, rtol=1 / 16, atol=2.0 ** -126 / 1024)
    assert values[5, 4 * 128 + 7].float() == 448 and values[5, 5 * 128 + 7].float() == -448


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_shows(bad):
    weights = torch.ones(256, 128)
    weights[3, 3] = bad
    values, scales = made(weights)
    assert values[3, 3].isnan() and (restored(values, scales)[128:] == 1).all()
