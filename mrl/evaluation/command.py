"""`mrl eval`: held-out results of a Hugging Face checkpoint, by the same engine, prompts and rewards as in training.

There are no trainers: the engines take the machine's first GPUs.
"""
from __future__ import annotations

import json
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mrl.cluster.fleet import STOP_TIMEOUT_S, start_fleet
from mrl.cluster.placement import with_device
from mrl.config.schema import Experiment
from mrl.engine.api import Version
from mrl.engine.guard import guard_this_process
from mrl.evaluation.report import Report, Result, flat_metrics, reports
from mrl.evaluation.samples import save_samples
from mrl.rollout.service import RolloutService
from mrl.rollout.types import Group


def evaluate(experiment: Experiment, model: Path | None) -> int:
    """Print the results of `model` (default: the experiment's model.path) on eval.datasets; 0 when done.

    Samples, metrics and logs are kept in a directory under log.dir. The experiment has passed `preflight_evaluation`.
    """
    experiment = with_device(experiment)
    if model is not None:
        section = experiment.model.model_copy(update={"path": str(model)})
        experiment = experiment.model_copy(update={"model": section})
    run_dir = (Path(experiment.log.dir) / f"{experiment.name}-eval-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    (run_dir / "logs").mkdir(parents=True)
    guard_this_process(STOP_TIMEOUT_S)
    console = Console()
    found = reports(_sample(experiment, run_dir, console), experiment.eval, experiment.seed)
    (run_dir / "metrics.json").write_text(json.dumps(flat_metrics(found), indent=1))
    for name, report in found.items():
        for table in tables(f"{experiment.model.path} on {name}", report, experiment.eval.confidence):
            console.print(table)
    if experiment.eval.save_samples:
        save_samples(run_dir / "samples", found)
        console.print(f"samples: {run_dir}/samples", soft_wrap=True)
    return 0


def tables(title: str, report: Report, confidence: float) -> list[Table]:
    """A table of the results, and one with a row for each subset if there are any."""
    whole = Table("metric", "value", f"{confidence:.0%} interval", title=title)
    for name, result in report.results.items():
        whole.add_row(name, _number(result.value), f"{_number(result.low)} - {_number(result.high)}")
    for name, count in report.counts.items():
        whole.add_row(name, _number(count), "")
    if not report.subsets:
        return [whole]
    names = list(report.results)
    parts = Table(report.subset_key, "prompts", *names, title=f"{title}, by {report.subset_key}")
    for value, part in report.subsets.items():
        parts.add_row(value, _number(part.counts["prompts"]), *(_with_margin(part.results[name]) for name in names))
    return [whole, parts]


def _sample(experiment: Experiment, run_dir: Path, console: Console) -> list[Group]:
    with console.status(f"starting {experiment.rollout.engine}") as status:
        with start_fleet(experiment, run_dir.name, run_dir, load_weights=True) as fleet:
            service = RolloutService(experiment, fleet.workers, fleet.engines, kinds=("eval",))
            service.ask_evaluation(Version(0, 0))

            def beat() -> None:
                status.update(f"{len(service.groups['eval'])} of {sum(service.heldout.values())} prompts sampled")

            try:
                service.wait(beat)
            finally:
                service.close()
            return service.take("eval")


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4f}"


def _with_margin(result: Result) -> str:
    return f"{result.value:.3f} ±{(result.high - result.low) / 2:.3f}"
