"""Times the math reward: how many responses a second a pool of grader processes scores.

    python tools/bench_reward.py [--processes 2] [--groups 500] [--samples 16]

Responses are short solutions whose answers are written in the forms that models write: whole numbers, decimals,
fractions, units, percentages, and (one in eight) expressions that only the computer-algebra system can compare. Groups
are scored as a rollout worker does it, all at once. Prints the rate of each of several rounds, and of each form by
itself.
"""
from __future__ import annotations

import argparse
import asyncio
import random
import time

from rich.console import Console
from rich.table import Table

from mrl.config.schema import Reward
from mrl.reward.api import Sample
from mrl.reward.pool import RewardPool

FORMS = {
    "whole number": lambda n: (str(n), rf"\boxed{{{n}}}"),
    "thousands": lambda n: (str(n * 1000), rf"\boxed{{{n * 1000:,}}}"),
    "decimal": lambda n: (f"{n}/4", rf"\boxed{{{n / 4}}}"),
    "fraction": lambda n: (rf"\frac{{{n}}}{{7}}", rf"\boxed{{\dfrac{{{n}}}{{7}}}}"),
    "unit": lambda n: (str(n), rf"\boxed{{{n}\text{{ cm}}}}"),
    "percent": lambda n: (rf"{n}\%", rf"\boxed{{{n}}}"),
    "last number": lambda n: (str(n), f"the answer is {n}."),
    "expression": lambda n: (rf"{n}\sqrt{{2}}", rf"\boxed{{\sqrt{{2}} \cdot {n}}}"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="grader processes")
    parser.add_argument("--groups", type=int, default=500, help="groups of a round")
    parser.add_argument("--samples", type=int, default=16, help="samples of a group")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    pool = RewardPool(Reward(kind="math", processes=options.processes))
    try:
        asyncio.run(measure(pool, options))
    finally:
        pool.close()


async def measure(pool: RewardPool, options: argparse.Namespace) -> None:
    """Score everything once to start the processes, then time the rounds."""
    console, everything = Console(), list(FORMS)
    await timed(pool, 2 * options.processes, options.samples, everything, seed=0)
    for number in range(options.rounds):
        rate = await timed(pool, options.groups, options.samples, everything, seed=number + 1)
        console.print(f"round {number + 1}: {rate:,.0f} responses/s with {options.processes} processes")
    table = Table("form", "responses/s")
    for form in FORMS:
        table.add_row(form, f"{await timed(pool, options.groups // 4, options.samples, [form], seed=9):,.0f}")
    console.print(table)


async def timed(pool: RewardPool, groups: int, samples: int, forms: list[str], seed: int) -> float:
    """Responses a second over `groups` groups, half of whose responses are wrong. Checks every score."""
    draw, batch, expected = random.Random(seed), [], []
    for index in range(groups):
        gold, right = FORMS[forms[index % len(forms)]](draw.randint(1, 10**4))
        wrong = r"so it is \boxed{0.123}"
        steps = "We add the two sides and find the sum. " * 5
        rights = [draw.random() < 0.5 for _ in range(samples)]
        batch.append([Sample("", steps + (right if good else wrong), gold) for good in rights])
        expected.append([float(good) for good in rights])
    start = time.perf_counter()
    results = await asyncio.gather(*(pool.score(group) for group in batch))
    seconds = time.perf_counter() - start
    scores = [[result.reward for result in group] for group in results]
    if scores != expected:
        raise RuntimeError("the pool gave other scores than it should")
    return groups * samples / seconds


if __name__ == "__main__":
    main()
