"""Do an engine's workers together hold every element of every tensor of the plan, and the right ones?

Each worker reports blocks of HF tensors (lattices) that it holds. Equal blocks of several workers are replicas and
count once; different blocks must not overlap, which shows in the element count and in the checksum.
"""
from __future__ import annotations

from math import prod
from typing import Iterable, Iterator, Mapping, Optional

from mrl.receiver.mrl_receiver.checksum import add
from mrl.receiver.mrl_receiver.wire import Holding, Lattice, Shape

MAX_PROBLEMS = 5


def coverage_problems(tensors: Mapping[str, Shape], replies: Iterable[Mapping],
                      expected: Optional[Mapping[str, Mapping]]) -> list[str]:
    """What is wrong, one sentence each; empty when all is well.

    tensors: every HF tensor's shape. replies: one a worker, with "holdings" and "opaque" in wire form. expected: the
    sums of what all senders have sent, {"shared": {name: sum}, "direct": {worker: {name: sum}}}; None: only coverage
    is checked. A tensor sent to all must add up over the engine, a shard on its worker. Tensors that are opaque on any
    worker are passed over.
    """
    replies = list(replies)
    opaque = {name for reply in replies for name in reply["opaque"]}
    problems = []
    for name, shape in tensors.items():
        if name in opaque:
            continue
        held = [_blocks(reply["holdings"].get(name, [])) for reply in replies]
        together: dict[Lattice, Optional[int]] = {}
        for worker, blocks in enumerate(held):
            for lattice, checksums in blocks.items():
                if {together.setdefault(lattice, checksums[0])} != set(checksums):
                    problems.append(f"{name}: worker {worker}'s copy differs from another")
        count = sum(prod(lattice[1]) for lattice in together)
        if count != prod(shape):
            problems.append(f"{name} of shape {list(shape)}: the engine takes {count} of its {prod(shape)} elements")
        elif expected is not None:
            problems += _sum_problems(name, held, together, expected)
    return problems


def _blocks(holdings: list[list]) -> dict[Lattice, list[Optional[int]]]:
    """The blocks that one worker holds, each with the checksums of all its copies there."""
    blocks: dict[Lattice, list[Optional[int]]] = {}
    for holding in map(Holding.from_wire, holdings):
        blocks.setdefault(holding.lattice, []).append(holding.checksum)
    return blocks


def _sum_problems(name: str, held: list[dict], together: dict, expected: Mapping[str, Mapping]) -> Iterator[str]:
    if name in expected["shared"]:
        total, wanted = _sum(together.values()), expected["shared"][name]
        if total != wanted:
            yield f"{name}: the engine's checksum {total} is not the trainer's {wanted}"
        return
    for worker, blocks in enumerate(held):
        total = _sum(checksums[0] for checksums in blocks.values())
        wanted = expected["direct"].get(str(worker), {}).get(name, 0)
        if total != wanted:
            yield f"{name}: worker {worker}'s checksum {total} is not the trainer's {wanted}"


def _sum(checksums: Iterable[int]) -> int:
    total = 0
    for checksum in checksums:
        total = add(total, checksum)
    return total


def summary(problems: list[str]) -> str:
    """The first few problems, and how many there are."""
    more = len(problems) - MAX_PROBLEMS
    return "; ".join(problems[:MAX_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
