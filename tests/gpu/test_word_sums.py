"""The kernel that sums words: right on a GPU, and how fast it reads."""
import sys
import time

import pytest
import torch

from tests.torchrun import ROOT

pytestmark = pytest.mark.gpu
ROWS, COLUMNS, ROUNDS = 1 << 17, 1 << 12, 10


@pytest.fixture
def modules(gpus, monkeypatch):
    """mrl_receiver.word_sums and tests/receiver/word_blocks.py, as engines import them."""
    gpus(1)
    monkeypatch.setattr(sys, "path", [str(ROOT / "mrl" / "receiver"), str(ROOT / "tests" / "receiver"), *sys.path])
    import mrl_receiver.word_sums
    import word_blocks

    return mrl_receiver.word_sums, word_blocks


def test_the_kernel_agrees_with_torch_and_reads_at_the_memorys_speed(modules):
    word_sums, word_blocks = modules
    device = torch.device("cuda", 0)
    assert isinstance(word_sums.adder(device), word_sums.Tiles)
    some = word_blocks.blocks("cuda", factor=50)
    assert word_blocks.sums(word_sums.Tiles(device), some) == word_blocks.sums(word_sums.Marginals(device), some)

    words = torch.randint(-2**62, 2**62, (ROWS, COLUMNS), device=device)
    for name, shard in (("a whole tensor", words), ("half of its columns", words[:, :COLUMNS // 2])):
        block = [(shard, 0, (COLUMNS, 1))]
        assert word_blocks.sums(word_sums.Tiles(device), block) == word_blocks.sums(word_sums.Marginals(device), block)
        speeds = []
        for adder in (word_sums.Tiles, word_sums.Marginals):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(ROUNDS):
                word_blocks.sums(adder(device), block)
            speeds.append(8 * shard.numel() * ROUNDS / (time.perf_counter() - began) / 1e9)
        print(f"{name}: {speeds[0]:.0f} GB/s with the kernel, {speeds[1]:.0f} GB/s with torch")
