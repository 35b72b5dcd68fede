"""Reads what runs have written about themselves, and sums a run up in a few figures.

    python tools/runs.py [NAME=]RUN_DIR… [--json FILE]
"""
from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from statistics import mean, median
from typing import Any, Iterator, Optional, Sequence

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.measure import Record, Row, show  # noqa: E402

Rows = Sequence[dict[str, Any]]
"""The rows of a metrics.jsonl."""
Curve = tuple[list[int], list[float]]
"""Steps, and a value at each."""
HELD_OUT = re.compile(r"eval/(\w+)/acc/mean@\d+")
ENDS = 10
"""Steps at either end of a run over which its reward is averaged."""


def read(words: Sequence[str]) -> dict[str, Rows]:
    """By name, the metrics of runs given as [NAME=]RUN_DIR; without NAME it is the folder's. SystemExit where there are
    none."""
    found = {}
    for word in words:
        name, _, folder = word.rpartition("=")
        path = Path(folder) / "metrics.jsonl"
        if not path.is_file():
            raise SystemExit(f"{path} does not exist: name run directories, as `mrl train` makes them")
        found[name or Path(folder).name] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return found


def curve(rows: Rows, kind: str, metric: str) -> Curve:
    """`metric` in the rows of this kind, by step. Of a step that was trained twice, as the run was resumed, the last
    row counts."""
    found = {row["step"]: row[metric] for row in rows if row["kind"] == kind and metric in row}
    return sorted(found), [found[step] for step in sorted(found)]


def held_out(rows: Rows) -> Iterator[tuple[str, Curve]]:
    """By held-out data set, the share of correct samples."""
    names = {name: found[1] for row in rows if row["kind"] == "eval" for name in row
             if (found := HELD_OUT.fullmatch(name))}
    for name, dataset in names.items():
        yield dataset, curve(rows, "eval", name)


def summary(rows: Rows) -> list[Row]:
    """Where the run began and where it ended. SystemExit for a run without a step."""
    steps, rewards = curve(rows, "train", "reward/mean")
    if not steps:
        raise SystemExit("the run has trained no step")
    differences, seconds = (curve(rows, "train", name)[1] for name in ("rollout/logprob_diff", "timing/step"))
    found = [Row("mean reward, last steps", mean(rewards[-ENDS:]), "", notes=f"first {mean(rewards[:ENDS]):.3f}, each "
                 f"of {min(ENDS, len(steps))} steps")]
    found += [Row(f"accuracy on {dataset}", values[-1], "", notes=f"after step {at[-1]}; {values[0]:.3f} after {at[0]}")
              for dataset, (at, values) in held_out(rows)]
    return [*found,
            Row("mean |Δ log p|, median step", median(differences), "nats", notes=f"most {max(differences):.4f}"),
            Row("step", median(seconds), "s", notes=f"{len(steps)} steps in {sum(seconds):.0f} s")]


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="[NAME=]RUN_DIR", nargs="+")
    parser.add_argument("--json", type=Path, help="append the figures there, as lines of JSON")
    options = parser.parse_args(argv)
    records = [Record("run", name, summary(rows)) for name, rows in read(options.runs).items()]
    show(records)
    for record in records if options.json else ():
        record.append(options.json)


if __name__ == "__main__":
    main()
