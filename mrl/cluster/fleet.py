"""The rollout side as Ray actors: one EngineServer an engine, and the rollout workers. The launcher owns them all."""
from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

import ray

from mrl.cluster.placement import place
from mrl.config.schema import Experiment

STOP_TIMEOUT_S = 30.0


class Fleet:
    """Handles of the actors. `engines[i]` is the gate of engine i."""

    def __init__(self, engines: list, workers: list):
        self.engines, self.workers = engines, workers

    @classmethod
    def connect(cls, engines: int, workers: int) -> Fleet:
        """The actors that the launcher made, from another process of the same Ray namespace."""
        return cls([ray.get_actor(f"engine-{i}") for i in range(engines)],
                   [ray.get_actor(f"worker-{i}") for i in range(workers)])


def connect_ray(address: str, namespace: str) -> None:
    """Join or start Ray quietly; `address` "local" starts an embedded one that ends with this process."""
    os.environ["RAY_DISABLE_FAILURE_SIGNAL_HANDLER"] = "1"  # a SIGTERM is no crash to be traced
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # mrl alone sets CUDA_VISIBLE_DEVICES
    options = {} if address != "local" else {"num_cpus": os.cpu_count(), "include_dashboard": False}
    ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="ERROR", **options)
    # Ray's own handlers end the process at once. These unwind it, like Ctrl-C, so that all that was started is stopped.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)


def _leave(number: int, _frame) -> None:
    raise SystemExit(128 + number)


def ray_address() -> str:
    """Where another process joins the Ray this one is connected to."""
    return ray.get_runtime_context().gcs_address


@contextmanager
def start_fleet(experiment: Experiment, run_id: str, run_dir: Path, load_weights: bool = False) -> Iterator[Fleet]:
    """Start engines and workers; on leaving, stop every engine and end Ray, however the block ended.

    load_weights: the engines read the model's weights from disk and serve at once, instead of waiting for a push.
    Raises what the first failing actor raised.
    """
    from mrl.engine.server import EngineServer
    from mrl.rollout.worker import RolloutWorker

    connect_ray(os.environ.get("RAY_ADDRESS", "local"), run_id)
    engines: list = []
    try:
        gate = ray.remote(num_cpus=0, max_concurrency=10_000)(EngineServer)
        for index, gpus in enumerate(place(experiment).engines):
            engines.append(gate.options(name=f"engine-{index}").remote(
                experiment, index, run_id, run_dir, gpus, load_weights))
        starting = [engine.start.remote() for engine in engines]
        actor = ray.remote(num_cpus=0, max_concurrency=1_000)(RolloutWorker)
        workers = [actor.options(name=f"worker-{i}").remote(experiment, engines)
                   for i in range(experiment.rollout.workers)]
        ray.get([worker.prepare.remote() for worker in workers])
        ray.get(starting)
        yield Fleet(engines, workers)
    finally:
        try:
            ray.get([engine.stop.remote() for engine in engines], timeout=STOP_TIMEOUT_S)
        finally:
            ray.shutdown()
