"""Who sits on which GPU: a pure table computed from the experiment file."""
from __future__ import annotations

from dataclasses import dataclass

from mrl.config.schema import Experiment
from mrl.preflight import count_gpus


@dataclass(frozen=True)
class Placement:
    """GPU indices on the machine: of the trainer ranks, in rank order, and of each engine's workers.

    On CPU the trainers' numbers count processes, and engines have none.
    """

    trainers: tuple[int, ...]
    engines: tuple[tuple[int, ...], ...]


def place(experiment: Experiment) -> Placement:
    """Split mode: trainers take the first GPUs, engines the rest. Colocated: engines share the trainers' GPUs."""
    cluster, tp = experiment.cluster, experiment.rollout.parallel.tp
    if experiment.loop.mode == "colocated_sync":
        trainers = rollout = tuple(range(cluster.gpus))
    else:
        trainers = tuple(range(cluster.trainer_gpus))
        rollout = tuple(range(cluster.trainer_gpus, cluster.trainer_gpus + cluster.rollout_gpus))
    engines = tuple(rollout[i:i + tp] for i in range(0, len(rollout), tp))
    return Placement(trainers, engines if cluster.device == "cuda" else tuple(() for _ in engines))


def with_device(experiment: Experiment) -> Experiment:
    """The experiment with `cluster.device: auto` decided for this machine."""
    if experiment.cluster.device != "auto":
        return experiment
    cluster = experiment.cluster.model_copy(update={"device": "cuda" if count_gpus() else "cpu"})
    return experiment.model_copy(update={"cluster": cluster})
