"""`mrl check --rates RUN`: how to split GPUs between trainers and engines, from the timings of a run.

The work of a step is taken to scale with the GPUs that do it: with G the GPU-seconds that generation takes, T those of
training and D those of a teacher, t trainer, r rollout and d teacher GPUs take max(G / r, T / t, D / d) a step in
one_step_overlap, and n shared ones max(G / n, D / d) + T / n in colocated_sync, each and the weight sync's time.
"""
from __future__ import annotations

import json
from math import lcm
from pathlib import Path
from statistics import median
from typing import Any, Container, Iterable, Mapping, NamedTuple, Optional

from mrl.config.errors import UserError
from mrl.config.load import load_experiment
from mrl.config.schema import Experiment

MIN_STEPS = 3
_TRAINING = ("old_log_prob", "ref_log_prob", "values", "update_actor", "update_critic")


class Rates(NamedTuple):
    """What one step takes, in the median of a run's steps: generation, training and a teacher's part in GPU-seconds,
    sync in seconds. teaching is None where the run had no teacher."""

    generation: float
    training: float
    sync: float
    steps: int
    teaching: float | None = None


class Split(NamedTuple):
    """A division of GPUs, the seconds that a step of it should take, and the share of it that each part idles."""

    trainer_gpus: int
    rollout_gpus: int
    step_s: float
    trainer_idle: float
    rollout_idle: float
    teacher_gpus: int = 0
    teacher_idle: float = 0.0


class Shared(NamedTuple):
    """How colocated_sync would use as many: `gpus` for trainers and engines, the rest for a teacher."""

    gpus: int
    teacher_gpus: int
    step_s: float


def trained_steps(run_dir: Path, among: Optional[Container[int]] = None) -> list[dict[str, float]]:
    """What metrics.jsonl says of a run's training steps, `among` the given ones, without the first, which also warms
    up."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line.get("kind") == "train" and line["step"] > 1
            and (among is None or line["step"] in among)]


def typical(steps: Iterable[Mapping[str, float]], names: Iterable[str]) -> float:
    """Seconds that the named timings took together, in the median step."""
    names = list(names)
    return median(sum(step.get(f"timing/{name}", 0.0) for name in names) for step in steps)


def measured(run_dir: Path, among: Optional[Container[int]] = None) -> Rates:
    """The rates of a run. `among`: only these steps count.

    Raises:
        UserError: no run directory, or one with too few steps.
    """
    files = run_dir / "config.yaml", run_dir / "metrics.jsonl"
    for file in files:
        if not file.is_file():
            raise UserError(f"--rates {run_dir}: no {file.name} there; name the directory of a run")
    exp = load_experiment(files[0])
    steps = trained_steps(run_dir, among)
    if len(steps) < MIN_STEPS:
        raise UserError(f"--rates {run_dir}: it has {len(steps)} steps after the first, at least {MIN_STEPS} are "
                        "needed")
    shared = exp.loop.mode == "colocated_sync"
    rollout_gpus = exp.cluster.gpus if shared else exp.cluster.rollout_gpus
    teaching = typical(steps, ["teach_sequences"]) * exp.cluster.teacher_gpus if exp.teacher else None
    return Rates(typical(steps, ["generate_sequences"]) * rollout_gpus, typical(steps, _TRAINING) * exp.trainer_ranks,
                 typical(steps, ["sync"]), len(steps), teaching)


def splits(exp: Experiment, rates: Rates, gpus: int) -> list[Split]:
    """Every division of `gpus` into whole trainer replicas, whole engines and whole engines of a teacher, the fastest
    first."""
    parallel = exp.trainer.parallel
    unit = lcm(parallel.tp * parallel.cp * parallel.pp, parallel.ep * parallel.etp * parallel.pp)
    found = []
    for teacher_gpus in _teacher_gpus(exp, gpus):
        teaching = rates.teaching / teacher_gpus if teacher_gpus else 0.0
        for trainer_gpus in range(unit, gpus - teacher_gpus, unit):
            rollout_gpus = gpus - teacher_gpus - trainer_gpus
            if rollout_gpus % exp.rollout.parallel.tp:
                continue
            training, generation = rates.training / trainer_gpus, rates.generation / rollout_gpus
            step_s = max(training, generation, teaching) + rates.sync
            found.append(Split(trainer_gpus, rollout_gpus, step_s, 1 - training / step_s, 1 - generation / step_s,
                               teacher_gpus, 1 - teaching / step_s if teacher_gpus else 0.0))
    return sorted(found, key=lambda split: split.step_s)


def colocated(exp: Experiment, rates: Rates, gpus: int) -> Shared:
    """The fastest step of colocated_sync, without the time to hand memory back and forth."""
    found = []
    for teacher_gpus in _teacher_gpus(exp, gpus):
        shared = gpus - teacher_gpus
        teaching = rates.teaching / teacher_gpus if teacher_gpus else 0.0
        step_s = max(rates.generation / shared, teaching) + rates.training / shared + rates.sync
        found.append(Shared(shared, teacher_gpus, step_s))
    return min(found, key=lambda one: one.step_s)


def _teacher_gpus(exp: Experiment, gpus: int) -> list[int]:
    """How many of `gpus` a teacher could have."""
    return [*range(exp.teacher.parallel.tp, gpus, exp.teacher.parallel.tp)] if exp.teacher else [0]


def report(exp: Experiment, run_dir: Path, gpus: int | None, shown: int = 8) -> dict[str, Any]:
    """What `mrl check --rates` shows: the rates, the best splits, and colocation for comparison.

    gpus: to be split; None: as many as the experiment's partitions have.

    Raises:
        UserError: as `measured`, or no division of so many GPUs exists.
    """
    rates = measured(run_dir)
    if exp.teacher and rates.teaching is None:
        raise UserError(f"--rates {run_dir}: that run had no teacher, and this experiment has one; name a run with it")
    cluster = exp.cluster
    partitions = cluster.gpus or (cluster.trainer_gpus or 0) + (cluster.rollout_gpus or 0)
    total = gpus or partitions + (cluster.teacher_gpus or 0)
    best = splits(exp, rates, total)
    if not best:
        raise UserError(f"--rates: {total} GPUs hold no whole trainer replica and whole engine side by side"
                        f"{', and an engine of the teacher' if exp.teacher else ''}; give more with --gpus, or lower "
                        "trainer.parallel, rollout.parallel or teacher.parallel")
    return {"rates": rates, "gpus": total, "splits": best[:shown], "colocated": colocated(exp, rates, total)}
