"""Splits a JSONL file of problems into train and held-out parts, in a fixed random order.

    python tools/split_jsonl.py problems.jsonl --out DIR [--heldout 200] [--seed 1]

Writes DIR/train.jsonl and DIR/heldout.jsonl. Identical prompts always land on the same side.
"""
from __future__ import annotations

import argparse
import json
import random
from pathlib import Path


def split(lines: list[str], heldout: int, seed: int, key: str) -> tuple[list[str], list[str]]:
    """(train, held out); `heldout` counts distinct prompts."""
    prompts = [json.dumps(json.loads(line)[key]) for line in lines]
    distinct = sorted(set(prompts))
    if not 0 < heldout < len(distinct):
        raise SystemExit(f"--heldout {heldout} must be between 1 and {len(distinct) - 1}, one less than the distinct "
                         "prompts")
    chosen = set(random.Random(seed).sample(distinct, heldout))
    return ([line for line, p in zip(lines, prompts) if p not in chosen],
            [line for line, p in zip(lines, prompts) if p in chosen])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--heldout", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--key", default="prompt")
    arguments = parser.parse_args()
    lines = [line for line in arguments.source.read_text(encoding="utf-8").splitlines() if line.strip()]
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, part in zip(("train", "heldout"), split(lines, arguments.heldout, arguments.seed, arguments.key)):
        (arguments.out / f"{name}.jsonl").write_text("\n".join(part) + "\n", encoding="utf-8")
        print(f"{arguments.out}/{name}.jsonl: {len(part)} problems")


if __name__ == "__main__":
    main()
