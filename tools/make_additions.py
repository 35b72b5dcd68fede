"""Makes additions for a pretrained chat model, each behind the same few that are solved, so that it answers in numbers.

    python tools/make_additions.py --out DIR [--numbers 21]

DIR/train.jsonl   {"prompt": [chat messages], "answer": "46"}: all additions of two numbers below NUMBERS but those of
DIR/heldout.jsonl one in ten pairs, in both orders
"""
from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Optional, Sequence

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.make_quickstart import make_problems  # noqa: E402

SOLVED = (("12+34=?", "46"), ("7+58=?", "65"), ("81+16=?", "97"))
HELD_OUT_SHARE = 10


def with_examples(problem: dict[str, str]) -> dict[str, Any]:
    """The problem as a chat in which some were solved before."""
    chat = [message for question, answer in SOLVED
            for message in ({"role": "user", "content": question}, {"role": "assistant", "content": answer})]
    return {"prompt": [*chat, {"role": "user", "content": problem["prompt"]}], "answer": problem["answer"]}


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--numbers", type=int, default=21, help="both numbers are below it, 5 at least")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    if options.numbers < 5:
        parser.error("--numbers must be at least 5")
    options.out.mkdir(parents=True, exist_ok=True)
    pairs = options.numbers * (options.numbers - 1) // 2 // HELD_OUT_SHARE
    for name, rows in zip(("train", "heldout"), make_problems(options.seed, options.numbers, pairs)):
        path = options.out / f"{name}.jsonl"
        path.write_text("".join(json.dumps(with_examples(row)) + "\n" for row in rows), encoding="utf-8")
        print(f"{path}: {len(rows)} problems")


if __name__ == "__main__":
    main()
