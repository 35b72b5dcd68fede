"""The rollout side as Ray actors: one EngineServer an engine, and the rollout workers. The launcher owns them all."""
from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Iterator

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from mrl.cluster.placement import place
from mrl.config.errors import UserError
from mrl.config.schema import Experiment

STOP_TIMEOUT_S = 30.0
PREPARE_TIMEOUT_S = 3600.0
"""Reading, tokenising and checking all prompts."""


class Fleet:
    """Handles of the actors that the loop talks to. `engines[i]` is the gate of engine i."""

    def __init__(self, engines: list, workers: list):
        self.engines, self.workers = engines, workers

    @classmethod
    def connect(cls, engines: int, workers: int) -> Fleet:
        """The actors that the launcher made, from another process of the same Ray namespace."""
        return cls(find_engines(engines), [ray.get_actor(f"worker-{i}") for i in range(workers)])


def find_engines(count: int) -> list:
    """The gates of all engines, by name, in any process of the run."""
    return [ray.get_actor(f"engine-{i}") for i in range(count)]


def find_teachers(count: int) -> list:
    """The gates of the teacher's engines, likewise."""
    return [ray.get_actor(f"teacher-{i}") for i in range(count)]


def connect_ray(address: str, namespace: str) -> None:
    """Join or start Ray quietly; `address` "local" starts an embedded one that ends with this process."""
    os.environ["RAY_DISABLE_FAILURE_SIGNAL_HANDLER"] = "1"  # a SIGTERM is no crash to be traced
    # Ray would kill just an actor's own children: the guard of an engine, and so the one who ends the engine's.
    os.environ["RAY_kill_child_processes_on_worker_exit"] = "false"
    # Engines are children of actors, which Ray starts with a lower priority than everything else on the machine.
    os.environ["RAY_worker_niceness"] = "0"
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # mrl alone sets CUDA_VISIBLE_DEVICES
    options = {} if address != "local" else {"num_cpus": os.cpu_count(), "include_dashboard": False}
    ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="ERROR", **options)
    # Ray sets a handler of its own. A trainer rank must end at once, even where it waits inside a collective.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def ray_address() -> str:
    """Where another process joins the Ray this one is connected to."""
    return ray.get_runtime_context().gcs_address


@contextmanager
def start_fleet(experiment: Experiment, run_id: str, run_dir: Path, load_weights: bool = False) -> Iterator[Fleet]:
    """Start engines and workers; on leaving, stop every engine and end Ray, however the block ended.

    load_weights: for evaluation. The engines read the model's weights from disk and serve at once instead of waiting
    for a push, and only the held-out prompts are read.
    Raises UserError for what the user can mend: prompts, reference answers, the engine's environment.
    """
    from mrl.data.prompts import DataError
    from mrl.engine.api import EngineStartError
    from mrl.engine.probe import look_into
    from mrl.engine.server import EngineServer
    from mrl.engine.teacher import teacher_experiment
    from mrl.engine.versions import version_warning
    from mrl.reward.api import RewardError
    from mrl.rollout.worker import RolloutWorker

    for section, key in ((experiment.rollout, "rollout"), (experiment.teacher, "teacher")):
        if section and (warning := version_warning(section.engine, look_into(section.python, section.engine).version)):
            print(f"warning: {key}.python={section.python}: {warning}", file=sys.stderr, flush=True)
    connect_ray(os.environ.get("RAY_ADDRESS", "local"), run_id)
    received: list[int] = []

    def leave(number: int, _frame) -> None:
        received.append(number)
        raise KeyboardInterrupt  # passes through a ray.get, where a SystemExit would lose its code

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
    engines: list = []
    try:
        gate = ray.remote(num_cpus=0, max_concurrency=10_000)(EngineServer)
        placement, on_gpus = place(experiment, trainers=not load_weights), experiment.cluster.device == "cuda"
        count, teachers = len(placement.engines), len(placement.teachers)
        for index, gpus in enumerate(placement.engines):
            engines.append(gate.options(name=f"engine-{index}").remote(
                experiment, index, run_id, run_dir, gpus if on_gpus else (), load_weights))
        for index, gpus in enumerate(placement.teachers):  # their numbers go on, so that logs and ports differ
            engines.append(gate.options(name=f"teacher-{index}").remote(
                teacher_experiment(experiment), count + index, run_id, run_dir, gpus if on_gpus else (), True))
        # A worker that dies is restarted empty, and RolloutService asks it again. A gate is not: its server went too.
        actor = ray.remote(num_cpus=0, max_concurrency=1_000, max_restarts=-1)(RolloutWorker)
        workers = [actor.options(name=f"worker-{i}").remote(experiment, partial(find_engines, count),
                                                                 partial(find_teachers, teachers))
                   for i in range(experiment.rollout.workers)]
        kinds = ("eval",) if load_weights else ("train", "eval")
        preparing = [worker.prepare.remote(kinds) for worker in workers]
        starting = [engine.start.remote() for engine in engines]
        try:
            ray.get(preparing, timeout=PREPARE_TIMEOUT_S)
            ray.get(starting, timeout=experiment.rollout.start_timeout_s + STOP_TIMEOUT_S)
        except (DataError, RewardError, EngineStartError) as error:
            raise UserError(str(error.cause)) from None
        yield Fleet(engines[:count], workers)
    except KeyboardInterrupt:
        if received:
            raise SystemExit(128 + received[0]) from None
        raise
    finally:
        _stop(engines)
        ray.shutdown()


def _stop(engines: list) -> None:
    """Stop every engine that can be; one that cannot does not keep the others from it."""
    stopping = [engine.stop.remote() for engine in engines]
    deadline = time.monotonic() + STOP_TIMEOUT_S
    for index, reference in enumerate(stopping):
        try:
            ray.get(reference, timeout=max(0.0, deadline - time.monotonic()))
        except (RayActorError, GetTimeoutError) as error:  # Ray ends the actor, and its guard the server
            print(f"engine {index} was not stopped in order: {type(error).__name__}", file=sys.stderr, flush=True)
