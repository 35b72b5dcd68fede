"""Blocks of words of every kind, and what both ways to sum them say; by itself, as a script: whether they agree.

Triton's interpreter (TRITON_INTERPRET=1) runs the kernel on the CPU.
"""
from __future__ import annotations

import torch

from mrl_receiver import word_sums
from mrl_receiver.word_sums import Marginals, Tiles


def blocks(device: str, factor: int = 1) -> list[tuple[torch.Tensor, int, tuple[int, ...]]]:
    """(words, start, strides). factor: of the larger ones' rows."""
    generator = torch.Generator(device).manual_seed(0)

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-2**62, 2**62, shape, device=device, generator=generator)

    wide = words(40 * factor, 700)
    return [
        (words(5, 7), 0, (7, 1)), (words(33), 11, (1,)), (words(1), 0, (1,)), (words(64 * factor, 512), 0, (512, 1)),
        (words(300 * factor, 701), 0, (701, 1)),
        (wide[:, :300], 0, (700, 1)), (wide[3:9, 100:650], 3 * 700 + 100, (700, 1)),  # shards within their tensor
        (words(6, 50), 50, (150, 1)), (words(6, 1), 2, (4, 1)), (words(1, 6), 9, (6, 1)),  # and alone
        (words(3, 4, 5), 0, (20, 5, 1)), (words(3, 8, 10)[:, :4, :6], 5, (80, 10, 1)),
    ]


def sums(adder: Marginals | Tiles, of: list[tuple[torch.Tensor, int, tuple[int, ...]]]) -> list[int]:
    """By block, mod 2^64."""
    found = [0] * len(of)
    for number, block in enumerate(of):
        adder.add(number, *block)
    for number, total in adder.totals():
        found[number] = (found[number] + total) % 2**64
    return found


def main() -> None:
    device, some = torch.device("cpu"), blocks("cpu")
    expected = sums(Marginals(device), some)
    assert sums(Tiles(device), some) == expected
    word_sums.LONGEST = 1000  # large blocks in several pieces
    assert sums(Tiles(device), some) == expected
    word_sums.FLUSH_WORDS = 100  # and in several goes
    assert sums(Tiles(device), some) == expected
    print(f"{len(some)} blocks agree")


if __name__ == "__main__":
    main()
