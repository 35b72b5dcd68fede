"""Real engines for tests: EngineServer actors in a Ray of their own, with a way past the gate."""
from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Iterator

import ray

from mrl.config.schema import Experiment
from mrl.engine.guard import descendants
from mrl.engine.server import EngineServer
from mrl.stream.report import PushReport
from tests.stream.tiny import weights
from tests.torchrun import torchrun

ROOT = Path(__file__).resolve().parent.parent.parent
NAMESPACE = "mrl-tests"
TOLERANCE = 1e-4  # of log-probs
STRATEGIES = ["broadcast", "multi_sender", "sharded"]
RUN_ID = "run-under-test"


class TestableEngine(EngineServer):
    """The gate, and what only tests may do."""

    async def workers(self, method: str, argument: str | None = None) -> list[dict]:
        """Call the worker extension past the gate."""
        return await self._server.call_workers(method, argument)

    async def processes(self) -> list[int]:
        """Process ids of the server and everything it has started."""
        guard = self._server.process.pid
        return [guard, *descendants(guard)]


def engine_python(engine: str) -> str:
    """Python of the environment of this engine that launch/setup.sh made."""
    return str(Path(os.environ.get("MRL_HOME", ROOT / ".mrl")) / engine / "bin" / "python")


def start_ray() -> Iterator[str]:
    """A Ray on this machine; yields the address under which other processes join it."""
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    os.environ["RAY_worker_niceness"] = "0"  # engines are no less urgent than whatever else is being tested
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    ray.init(num_cpus=2, include_dashboard=False, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR",
             runtime_env={"env_vars": {"PYTHONPATH": path}})
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def make_engine(experiment: Experiment, run_dir: Path, name: str, **keywords: Any):
    """Handle of an engine actor that has not been started."""
    actor = ray.remote(num_cpus=0, max_concurrency=1000)(TestableEngine)
    return actor.options(name=name).remote(experiment, 0, RUN_ID, run_dir, **keywords)


def push_from_gang(bench, tmp_path: Path, ranks: int, layouts: list[tuple[int, int]]) -> list[list[PushReport]]:
    """The reports of two pushes by each strategy, by (tp, pp), from a gang of processes to the engine on the bench.

    After each layout's last push the engine's log-probs are those of the weights.
    """
    config = tmp_path / "experiment.json"
    config.write_text(bench.experiment.model_dump_json())
    first = bench.next_step()
    output = torchrun(ROOT / "tests/stream/push_ranks.py", ranks, config, bench.ray_address, bench.name, str(first),
                      *(f"{tp},{pp}" for tp, pp in layouts))
    reports = [PushReport.from_json(line.split("REPORT ", 1)[1]) for line in output.splitlines() if "REPORT " in line]
    answers = [json.loads(line.split("SAMPLED ", 1)[1]) for line in output.splitlines() if "SAMPLED " in line]
    assert len(answers) == len(layouts)
    pushes = 2 * len(STRATEGIES)
    bench.step = first + pushes * len(layouts) - 1
    for last, (token_ids, log_probs) in zip(range(first + pushes - 1, bench.step + 1, pushes), answers, strict=True):
        error = bench.error_of(token_ids, log_probs, weights(bench.model, last))
        assert error < TOLERANCE, f"version {last}: {error}"
    return [reports[at:at + pushes] for at in range(0, len(reports), pushes)]
