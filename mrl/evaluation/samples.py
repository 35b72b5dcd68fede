"""Every evaluated sample in files: one a data set, one JSON object a line."""
from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from mrl.evaluation.report import Report, sample_rows


def save_samples(folder: Path, found: Mapping[str, Report]) -> None:
    """Write the samples behind `found` to <folder>/<data set>.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, report in found.items():
        with open(folder / f"{name}.jsonl", "w", encoding="utf-8", errors="backslashreplace") as file:
            for row in sample_rows(report.groups):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
