"""Who sits on which GPU: a pure table computed from the experiment file."""
from __future__ import annotations

from dataclasses import dataclass

from mrl.config.schema import Experiment


@dataclass(frozen=True)
class Placement:
    """GPU indices on the node: of the trainer ranks, in rank order, and of each engine's workers.

    On CPU the same numbers count processes and name no device.
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
    return Placement(trainers, tuple(rollout[i:i + tp] for i in range(0, len(rollout), tp)))
