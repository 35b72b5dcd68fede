"""One engine behind its gate, as benchmarks start it: their options, the engine's arguments, its life."""
from __future__ import annotations

import argparse
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, Sequence

import ray
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from mrl.cluster.fleet import connect_ray  # noqa: E402
from mrl.config.schema import Experiment  # noqa: E402
from mrl.engine.server import EngineServer  # noqa: E402
from tools.workload import SHAPES  # noqa: E402

CONCURRENCY = 10_000
"""Calls that a gate answers at a time."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """What says which engine, and where."""
    parser.add_argument("--python", required=True, help="Python of an environment with the engine")
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--engine-tp", type=int, default=1, help="GPUs of the engine")
    parser.add_argument("--engine-memory", type=float, default=0.6, help="the engine's share of a GPU, as it counts it")
    parser.add_argument("--engine-arg", action="append", default=[], help="extra argument of the engine (repeat)")
    parser.add_argument("--start-timeout", type=float, default=600)


def add_model_options(parser: argparse.ArgumentParser, shape: str) -> None:
    """What says which model, by default random weights of that shape, and where the figures go."""
    parser.add_argument("--model", type=Path, help="a Hugging Face model directory")
    parser.add_argument("--shape", choices=SHAPES, default=shape, help="random weights, without --model")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs in the engine")
    parser.add_argument("--json", type=Path, help="append the figures there, as one line of JSON")


def arguments(options: argparse.Namespace, graphs: bool) -> list[str]:
    """Extra arguments of the engine. `graphs`: on a GPU, capture CUDA graphs."""
    found = list(options.engine_arg)
    if options.device == "cpu":
        return found
    if options.engine == "vllm":
        found += ["--gpu-memory-utilization", str(options.engine_memory)]
        return found if graphs else [*found, "--enforce-eager"]
    found += ["--mem-fraction-static", str(options.engine_memory)]
    return found if graphs else [*found, "--disable-cuda-graph"]


@contextmanager
def running(experiment: Experiment, folder: Path, first_gpu: int = 0, load_weights: bool = False
            ) -> Iterator[ray.actor.ActorHandle]:
    """The gate of a running engine on the GPUs from `first_gpu` on; its log goes to folder/logs. Ends Ray too."""
    gpus: Sequence[int] = ()
    if experiment.cluster.device == "cuda":
        gpus = range(first_gpu, first_gpu + experiment.rollout.parallel.tp)
    connect_ray("local", experiment.name)
    gate = ray.remote(num_cpus=0, max_concurrency=CONCURRENCY)(EngineServer).remote(
        experiment, 0, experiment.name, folder, [str(gpu) for gpu in gpus], load_weights)
    try:
        began = time.monotonic()
        ray.get(gate.start.remote())
        print(f"{experiment.rollout.engine} answers after {time.monotonic() - began:.0f} s", flush=True)
        yield gate
    finally:
        ray.get(gate.stop.remote())
        ray.shutdown()
