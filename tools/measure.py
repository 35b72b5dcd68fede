"""How benchmarks measure and what they hand over: ways that take turns, rows of figures, one table, JSON lines.

    python tools/measure.py FILE…      one table of all that benchmarks have appended to the FILEs (their --json)
"""
from __future__ import annotations

import argparse
import importlib.metadata
import json
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Callable, Mapping, Optional, Sequence

import torch
from rich.console import Console
from rich.table import Table

PACKAGES = ("torch", "megatron-core", "transformer-engine", "vllm", "sglang", "transformers")


@dataclass(frozen=True)
class Row:
    """One figure. `ratio` compares it with the row named `to`, in the sense that the benchmark says."""

    what: str
    value: float
    unit: str
    ratio: Optional[float] = None
    to: str = ""
    notes: str = ""


@dataclass(frozen=True)
class Record:
    """All figures of one run of a benchmark; `setting` says what a reader needs to repeat it."""

    tool: str
    setting: str
    rows: Sequence[Row]
    when: str = field(default_factory=lambda: datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"))
    device: str = field(default_factory=lambda: torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
    versions: Mapping[str, str] = field(default_factory=lambda: versions())

    def append(self, path: Path) -> None:
        """One more line of JSON at the end of `path`."""
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(self)) + "\n")


def versions() -> dict[str, str]:
    """Of the packages that matter, as far as this Python has them."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def alternate(ways: Mapping[str, Callable[[], float]], rounds: int, quiet: bool = False) -> dict[str, float]:
    """The median of what each way returns in `rounds` rounds, in which they take turns, in every other round from the
    last to the first; one round before is not counted. So what else the machine does, or that it gets faster with
    time, concerns all of them alike. Unless `quiet`, every value is printed at once, lest a run that is ended early
    leave nothing."""
    values: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(1 + rounds):
        for name, measure in [*ways.items()][::-1 if turn % 2 else 1]:
            value = measure()
            if not quiet:
                print(f"round {turn} of {rounds}: {name}: {value:.5g}", flush=True)
            if turn:
                values[name].append(value)
    return {name: median(found) for name, found in values.items()}


def hand_over(record: Record, path: Optional[Path]) -> None:
    """Print the table, and append the record to `path` if there is one."""
    show([record])
    if path is not None:
        record.append(path)


def show(records: Sequence[Record]) -> None:
    """One table of all rows, the records one after another."""
    table = Table(title=f"{records[0].device}; " + ", ".join(f"{k} {v}" for k, v in records[0].versions.items()))
    for heading in ("what", "value", "unit", "ratio", "to", "notes"):
        table.add_column(heading, justify="right" if heading in ("value", "ratio") else "left", overflow="fold")
    for record in records:
        table.add_section()
        table.add_row(f"[bold]{record.tool}[/bold]", "", "", "", "", f"{record.setting} ({record.when})")
        for row in record.rows:
            ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
            table.add_row(row.what, f"{row.value:,.4g}", row.unit, ratio, row.to, row.notes)
    Console(width=160).print(table)


def read(paths: Sequence[Path]) -> list[Record]:
    """The records in the files, in order."""
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    return [Record(**{**fields, "rows": [Row(**row) for row in fields["rows"]]}) for fields in map(json.loads, lines)]


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path)
    if records := read(parser.parse_args(argv).files):
        show(records)
    else:
        print("no figures")


if __name__ == "__main__":
    main()
