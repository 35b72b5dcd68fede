"""`mrl check --rates RUN`: how to split GPUs between trainers and engines, from the timings of a run.

The work of a step is taken to scale with the GPUs that do it: with G the GPU-seconds that generation takes and T those
of training, t trainer and r rollout GPUs take max(G / r, T / t) a step in one_step_overlap, and n shared ones
(G + T) / n in colocated_sync, each and the weight sync's time.
"""
from __future__ import annotations

import json
from math import lcm
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from mrl.config.errors import UserError
from mrl.config.load import load_experiment
from mrl.config.schema import Experiment

MIN_STEPS = 3
_TRAINING = ("old_log_prob", "ref_log_prob", "values", "update_actor", "update_critic")


class Rates(NamedTuple):
    """What one step takes, in the median of a run's steps: generation and training in GPU-seconds, sync in seconds."""

    generation: float
    training: float
    sync: float
    steps: int


class Split(NamedTuple):
    """A division of GPUs, the seconds that a step of it should take, and the share of it that each side idles."""

    trainer_gpus: int
    rollout_gpus: int
    step_s: float
    trainer_idle: float
    rollout_idle: float


def measured(run_dir: Path) -> Rates:
    """The rates of a run, without its first step, which also warms up.

    Raises:
        UserError: no run directory, or one with too few steps.
    """
    files = run_dir / "config.yaml", run_dir / "metrics.jsonl"
    for file in files:
        if not file.is_file():
            raise UserError(f"--rates {run_dir}: no {file.name} there; name the directory of a run")
    exp = load_experiment(files[0])
    lines = [json.loads(line) for line in files[1].read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if line.get("kind") == "train" and line["step"] > 1]
    if len(steps) < MIN_STEPS:
        raise UserError(f"--rates {run_dir}: it has {len(steps)} steps after the first, at least {MIN_STEPS} are "
                        "needed")
    shared = exp.loop.mode == "colocated_sync"
    rollout_gpus = exp.cluster.gpus if shared else exp.cluster.rollout_gpus

    def typical(names: tuple[str, ...]) -> float:
        return median(sum(step.get(f"timing/{name}", 0.0) for name in names) for step in steps)

    return Rates(typical(("generate_sequences",)) * rollout_gpus, typical(_TRAINING) * exp.trainer_ranks,
                 typical(("sync",)), len(steps))


def splits(exp: Experiment, rates: Rates, gpus: int) -> list[Split]:
    """Every division of `gpus` into whole trainer replicas and whole engines, the fastest first."""
    parallel = exp.trainer.parallel
    unit = lcm(parallel.tp * parallel.cp * parallel.pp, parallel.ep * parallel.etp * parallel.pp)
    found = []
    for trainer_gpus in range(unit, gpus, unit):
        rollout_gpus = gpus - trainer_gpus
        if rollout_gpus % exp.rollout.parallel.tp == 0:
            training, generation = rates.training / trainer_gpus, rates.generation / rollout_gpus
            step_s = max(training, generation) + rates.sync
            found.append(Split(trainer_gpus, rollout_gpus, step_s, 1 - training / step_s, 1 - generation / step_s))
    return sorted(found, key=lambda split: split.step_s)


def colocated_step_s(rates: Rates, gpus: int) -> float:
    """Seconds of a step of colocated_sync, without those of handing memory back and forth."""
    return (rates.generation + rates.training) / gpus + rates.sync


def report(exp: Experiment, run_dir: Path, gpus: int | None, shown: int = 8) -> dict[str, Any]:
    """What `mrl check --rates` shows: the rates, the best splits, and colocation for comparison.

    gpus: to be split; None: as many as the experiment's partitions have.

    Raises:
        UserError: as `measured`, or no division of so many GPUs exists.
    """
    rates = measured(run_dir)
    cluster = exp.cluster
    total = gpus or cluster.gpus or (cluster.trainer_gpus or 0) + (cluster.rollout_gpus or 0)
    best = splits(exp, rates, total)
    if not best:
        raise UserError(f"--rates: {total} GPUs hold no whole trainer replica and whole engine side by side; "
                        "give more with --gpus, or lower trainer.parallel or rollout.parallel")
    return {"rates": rates, "gpus": total, "splits": best[:shown], "colocated_step_s": colocated_step_s(rates, total)}
