"""Draws the learning curves of one or several runs into one picture.

    pip install -r launch/requirements/plot.txt
    python tools/plot_runs.py [NAME=]RUN_DIR… --out curves.png [--smooth 5]

Above one another: the mean reward of every step's batch, the held-out results, and how far trainer and engine differ in
log-probs. A run is named by NAME, or else by its folder.
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Mapping, Optional, Sequence

import matplotlib

matplotlib.use("Agg")  # needs no display
from matplotlib import pyplot  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.runs import Rows, curve, held_out, read  # noqa: E402


def smoothed(values: Sequence[float], width: int) -> list[float]:
    """The mean over up to `width` values that end at each."""
    return [sum(values[max(0, end - width):end]) / min(end, width) for end in range(1, len(values) + 1)]


def draw(runs: Mapping[str, Rows], smooth: int, out: Path) -> None:
    """One column of panels with a line a run, its colour the same in all of them."""
    figure, (reward, accuracy, difference) = pyplot.subplots(3, 1, sharex=True, figsize=(8, 9), layout="constrained")
    for index, (name, rows) in enumerate(runs.items()):
        colour = f"C{index}"
        steps, values = curve(rows, "train", "reward/mean")
        reward.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
        reward.plot(steps, smoothed(values, smooth), color=colour, label=name)
        for dataset, (steps, values) in held_out(rows):
            accuracy.plot(steps, values, color=colour, marker="o", markersize=3, label=f"{name}: {dataset}")
        difference.plot(*curve(rows, "train", "rollout/logprob_diff"), color=colour, label=name)
    reward.set_ylabel(f"mean reward (line: of {smooth} steps)")
    accuracy.set_ylabel("held-out accuracy")
    difference.set_ylabel("mean |Δ log p|, trainer and engine")
    difference.set_xlabel("step")
    for panel in (reward, accuracy, difference):
        panel.grid(alpha=0.3)
        if panel.has_data():
            panel.legend(fontsize="small")
    figure.savefig(out, dpi=110)
    pyplot.close(figure)


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="[NAME=]RUN_DIR", nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="the picture; its suffix says in which format")
    parser.add_argument("--smooth", type=int, default=5, help="steps that a point of the reward's line is the mean of")
    options = parser.parse_args(argv)
    if options.smooth < 1:
        parser.error("--smooth must be at least 1")
    draw(read(options.runs), options.smooth, options.out)


if __name__ == "__main__":
    main()
