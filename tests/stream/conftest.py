"""One Ray for all tests of this folder, and one server of each engine at a time: it takes half a minute to start."""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray

from mrl.config.schema import Experiment
from mrl.engine.api import GenerateRequest
from mrl.engine.engines import SERVERS
from mrl.reshard.layout import Layout
from mrl.stream.sync import WeightSync
from tests.stream.engines import RUN_ID, alive, engine_python, make_engine, start_ray
from tests.stream.tiny import EXPERTS, PROMPT, FakeTrainer, make_experiment, make_model, reference_log_probs, weights


@dataclass
class Bench:
    """An engine on the bench: the experiment, its model, the actor, and the Ray and the name to reach it by."""

    experiment: Experiment
    model: Path
    engine: Any
    ray_address: str
    name: str
    step: int = 0

    def next_step(self) -> int:
        """A version newer than all before, in whatever order the tests run."""
        self.step += 1
        return self.step

    def call(self, method: str, *arguments: Any) -> Any:
        return ray.get(getattr(self.engine, method).remote(*arguments), timeout=300)

    def log_prob_error(self, tensors: dict, temperature: float = 1.0) -> float:
        """Largest difference between the engine's log-probs of what it samples and transformers'."""
        sampled = self.call("generate", GenerateRequest(PROMPT, seed=3, max_tokens=20, temperature=temperature))
        return self.error_of(sampled.token_ids, sampled.log_probs, tensors, temperature)

    def error_of(self, token_ids: list[int], log_probs: list[float], tensors: dict, temperature: float = 1.0) -> float:
        """Largest difference between these log-probs of an answer to PROMPT and transformers'."""
        expected = reference_log_probs(self.model, tensors, PROMPT, token_ids, temperature)
        return max(abs(a - b) for a, b in zip(log_probs, expected.tolist(), strict=True))


@pytest.fixture(scope="session")
def ray_address():
    yield from start_ray()


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session", params=sorted(SERVERS))
def bench(request, ray_address, model, tmp_path_factory):
    experiment = make_experiment(model, engine_python(request.param), sync={"verify_every": 2},
                                 rollout={"engine": request.param, "max_restarts": 9})
    yield from running(experiment, model, tmp_path_factory.mktemp("run"), ray_address)


@pytest.fixture(scope="module", params=sorted(SERVERS))
def bench_tp2(request, ray_address, model, tmp_path_factory):
    experiment = make_experiment(model, engine_python(request.param), sync={"verify_every": 2},
                                 rollout={"engine": request.param, "parallel": {"tp": 2}},
                                 cluster={"rollout_gpus": 2})
    yield from running(experiment, model, tmp_path_factory.mktemp("run"), ray_address)


@pytest.fixture(scope="module", params=sorted(SERVERS))
def bench_experts(request, ray_address, tmp_path_factory):
    """Experts dealt out over two workers; it serves the weights of the model directory from the start."""
    model = make_model(tmp_path_factory.mktemp("experts") / "model", EXPERTS)
    experiment = make_experiment(model, engine_python(request.param), sync={"verify_every": 1},
                                 rollout={"engine": request.param, "parallel": {"tp": 2, "ep": 2}},
                                 cluster={"rollout_gpus": 2})
    yield from running(experiment, model, tmp_path_factory.mktemp("run"), ray_address, load_weights=True)


def running(experiment, model, run_dir, ray_address, **keywords):
    """Start an engine, yield it, and see that nothing of it is left afterwards."""
    parallel = experiment.rollout.parallel
    name = f"{experiment.rollout.engine}-tp{parallel.tp}-ep{parallel.ep}"  # of the actor: not free again at once
    engine = make_engine(experiment, run_dir, name, **keywords)
    ray.get(engine.start.remote(), timeout=700)
    bench = Bench(experiment, model, engine, ray_address, name)
    yield bench
    processes = bench.call("processes")
    assert len(processes) > 2
    bench.call("stop")
    assert not [pid for pid in processes if alive(pid)]


@pytest.fixture(params=["broadcast"])
def pushing(bench, one_rank, request):
    """(trainer, sync) of a one-rank gang. Parametrise indirectly for another strategy."""
    yield from gang_of_one(bench, request.param)


@pytest.fixture
def pushing_tp2(bench_tp2, one_rank, request):
    yield from gang_of_one(bench_tp2, request.param)


def gang_of_one(bench, strategy: str):
    settings = bench.experiment.sync.model_copy(update={"strategy": strategy})
    trainer = FakeTrainer(bench.model, Layout(), Layout().coord(0))
    trainer.become(weights(bench.model, 0))
    sync = WeightSync(bench.experiment.model_copy(update={"sync": settings}), trainer, [bench.engine], RUN_ID)
    yield trainer, sync
    sync.close()
