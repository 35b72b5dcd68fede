"""Makes additions for a small pretrained chat model, each behind six that are solved, so that it answers in numbers.

    python tools/make_additions.py --out DIR [--largest 5]

DIR/train.jsonl   {"prompt": [chat messages], "answer": "62"}: a two-digit number and one of 0 … LARGEST, such as 59+3=?
DIR/heldout.jsonl one in ten of them, chosen at random
"""
from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any, Optional, Sequence

SOLVED = ((59, 3), (21, 1), (84, 0), (47, 4), (12, 5), (36, 2))
HELD_OUT_SHARE = 10


def chat(first: int, second: int) -> list[dict[str, str]]:
    """The problem as a chat in which others were solved before."""
    turns = [turn for a, b in SOLVED for turn in (("user", f"{a}+{b}=?"), ("assistant", str(a + b)))]
    return [{"role": role, "content": content} for role, content in [*turns, ("user", f"{first}+{second}=?")]]


def make_additions(largest: int, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """All but the solved ones, in random order, as (train, held out)."""
    pairs = [(a, b) for a in range(10, 100) for b in range(largest + 1) if (a, b) not in SOLVED]
    random.Random(seed).shuffle(pairs)
    rows = [{"prompt": chat(a, b), "answer": str(a + b)} for a, b in pairs]
    held_out = len(rows) // HELD_OUT_SHARE
    return rows[held_out:], rows[:held_out]


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--largest", type=int, choices=range(1, 100), default=5, metavar="N", help="second number")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(("train", "heldout"), make_additions(options.largest, options.seed)):
        path = options.out / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{path}: {len(rows)} problems")


if __name__ == "__main__":
    main()
