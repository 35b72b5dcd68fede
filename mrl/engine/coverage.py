"""Do an engine's workers together hold every element of every tensor of the plan, and the right ones?

Each worker reports blocks of HF tensors (lattices) that it holds. Equal blocks of several workers are replicas and
count once; different blocks must not overlap, which shows in the element count and in the checksum.
"""
from __future__ import annotations

from typing import Iterable, Mapping, Optional

from mrl.receiver.mrl_receiver.checksum import add
from mrl.receiver.mrl_receiver.wire import Holding, Item, Lattice

MAX_PROBLEMS = 5


def coverage_problems(items: Mapping[str, Item], replies: Iterable[Mapping], expected: Optional[Mapping[str, int]]
                      ) -> list[str]:
    """What is wrong, one sentence each; empty when all is well.

    replies: one a worker, with "holdings" and "opaque" in wire form. expected: the senders' checksum of every HF
    tensor; None: only coverage is checked. Tensors that are opaque on any worker are passed over.
    """
    replies = list(replies)
    opaque = {name for reply in replies for name in reply["opaque"]}
    problems = []
    for name, item in items.items():
        if name in opaque:
            continue
        blocks: dict[Lattice, int | None] = {}
        for worker, reply in enumerate(replies):
            for wire in reply["holdings"].get(name, []):
                holding = Holding.from_wire(wire)
                if blocks.setdefault(holding.lattice, holding.checksum) != holding.checksum:
                    problems.append(f"{name}: worker {worker}'s copy differs from another's")
        held = sum(Holding(lattice).numel for lattice in blocks)
        if held != item.numel:
            problems.append(f"{name} of shape {list(item.shape)}: the engine takes {held} of its {item.numel} elements")
        elif expected is not None:
            total = 0
            for block_sum in blocks.values():
                total = add(total, block_sum)
            if total != expected[name]:
                problems.append(f"{name}: the engine's checksum {total} is not the trainer's {expected[name]}")
    return problems


def summary(problems: list[str]) -> str:
    """The first few problems, and how many there are."""
    more = len(problems) - MAX_PROBLEMS
    return "; ".join(problems[:MAX_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
