"""Who sits on which GPU: a pure table computed from the experiment file and the GPUs this process may use."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mrl.config.errors import UserError
from mrl.config.schema import Experiment
from mrl.preflight import count_gpus, visible_devices


@dataclass(frozen=True)
class Placement:
    """Device names, as CUDA_VISIBLE_DEVICES takes them: of the trainer ranks, in rank order, and of the workers of each
    engine and of each of the teacher's engines. On CPU the names count processes.
    """

    trainers: tuple[str, ...]
    engines: tuple[tuple[str, ...], ...]
    teachers: tuple[tuple[str, ...], ...] = ()


def place(experiment: Experiment, trainers: bool = True) -> Placement:
    """The placement on this machine, within CUDA_VISIBLE_DEVICES. Without `trainers`: engines alone, for evaluation.

    `cluster.device` must be decided (`with_device`). UserError when too few GPUs are visible.
    """
    return assign(experiment, visible_devices() if experiment.cluster.device == "cuda" else None, trainers)


def assign(experiment: Experiment, visible: Sequence[str] | None, trainers: bool = True) -> Placement:
    """Deal out the devices named `visible`; None: "0", "1", … as many as are needed.

    Split mode: trainers take the first devices, engines the rest. Colocated: engines share the trainers' devices.
    The teacher's engines come last. Without `trainers` there are none, and the engines start at the first device in
    either mode.
    """
    tp, ranks = experiment.rollout.parallel.tp, experiment.trainer_ranks if trainers else 0
    first = 0 if experiment.loop.mode == "colocated_sync" else ranks
    last = max(ranks, first + experiment.engine_count * tp)
    teachers, teacher_tp = (experiment.teacher_count, experiment.teacher.parallel.tp) if (
        trainers and experiment.teacher) else (0, 1)
    needed = last + teachers * teacher_tp
    names = [str(index) for index in range(needed)] if visible is None else list(visible)
    if len(names) < needed:
        raise UserError(f"too few GPUs: {needed} are needed, and CUDA_VISIBLE_DEVICES names {len(names)} "
                        f"({','.join(names)}): let it name more, or make the partitions under `cluster` smaller")

    def workers(first: int, count: int, tp: int) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(names[start:start + tp]) for start in range(first, first + count * tp, tp))

    return Placement(tuple(names[:ranks]), workers(first, experiment.engine_count, tp),
                     workers(last, teachers, teacher_tp))


def ranks_beside(experiment: Experiment) -> tuple[tuple[int, ...], ...]:
    """By engine and worker, the trainer rank on the same GPU, in a mode in which they share GPUs."""
    placement = assign(experiment, visible=None)
    ranks = {device: rank for rank, device in enumerate(placement.trainers)}
    return tuple(tuple(ranks[device] for device in workers) for workers in placement.engines)


def with_device(experiment: Experiment) -> Experiment:
    """The experiment with `cluster.device: auto` decided for this machine."""
    if experiment.cluster.device != "auto":
        return experiment
    cluster = experiment.cluster.model_copy(update={"device": "cuda" if count_gpus() else "cpu"})
    return experiment.model_copy(update={"cluster": cluster})
