"""The stand-ins of SGLang's CPU engine compute what the originals do, or refuse."""
from typing import NamedTuple

import pytest
import torch

from mrl.engine.sglang_cpu import sgl_kernel
from mrl.engine.sglang_cpu.sglang_cpu_server import murmur_hash32, without_others_experts


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, byte by byte as published; len(data) is a multiple of 4."""
    state, word = 0, 0xFFFFFFFF
    for start in range(0, len(data), 4):
        block = int.from_bytes(data[start:start + 4], "little") * 0xCC9E2D51 & word
        block = (block << 15 | block >> 17) & word
        state ^= block * 0x1B873593 & word
        state = (state << 13 | state >> 19) & word
        state = state * 5 + 0xE6546B64 & word
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & word
    state = (state ^ state >> 13) * 0xC2B2AE35 & word
    return state ^ state >> 16


def test_the_hash_is_murmur3_of_seed_position_and_column():
    seeds, positions, columns = [0, 1, 2**40 + 7, -5], [0, 9, 2**20, 3], [0, 1, 66]
    found = murmur_hash32(torch.tensor(seeds).to(torch.uint64), torch.tensor(positions, dtype=torch.int32),
                          torch.tensor(columns))
    expected = [[murmur3((seed % 2**64).to_bytes(8, "little") + position.to_bytes(4, "little")
                         + column.to_bytes(4, "little")) for column in columns]
                for seed, position in zip(seeds, positions)]
    assert found.tolist() == expected


def test_cache_places_are_written_request_by_request():
    table = torch.zeros(3, 6, dtype=torch.int32)
    sgl_kernel.assign_req_to_token_pool_cpu(torch.tensor([2, 0]), table, torch.tensor([1, 0]), torch.tensor([3, 4]),
                                            torch.tensor([7, 8, 1, 2, 3, 4]), 6)
    assert table.tolist() == [[1, 2, 3, 4, 0, 0], [0] * 6, [0, 7, 8, 0, 0, 0]]


def test_speculative_decoding_is_refused():
    with pytest.raises(NotImplementedError, match="verify_tree_greedy_cpu: speculative decoding is not available"):
        sgl_kernel.verify_tree_greedy_cpu(1, 2)


class Chosen(NamedTuple):
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor


def test_experts_of_other_workers_give_nothing():
    """With experts that multiply by their number, of which this worker holds 0 … 2."""
    chosen = Chosen(torch.tensor([[0.5, 0.5], [1.0, 3.0]]), torch.tensor([[2, -1], [-1, -1]]))

    def forward(layer, hidden, topk, config):
        assert all(min(row) >= 0 and len({*row}) == len(row) for row in topk.topk_ids.tolist())
        return hidden * (topk.topk_weights * (topk.topk_ids + 1)).sum(-1, keepdim=True)

    assert without_others_experts(forward, None, torch.ones(2, 1), chosen, None).tolist() == [[1.5], [0.0]]
