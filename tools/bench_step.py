"""Times steps of one_step_overlap, one GPU training and one sampling, beside colocated_sync on both, by `mrl train`.

    python tools/bench_step.py --python ENGINE_PYTHON [--engine sglang] [--json FILE]

Both runs do the same work: random weights, which a learning rate of next to nothing leaves as they are, and the same
prompts and seeds. Such a model samples nearly evenly from its vocabulary, so that with every `--mean`-th token a stop
token the lengths of responses are geometric, cut at --longest: most of a step's sampling waits for a few of them.
Longer prompts are more to train on and hardly more to sample: they move the ratio between the two. A run has `--steps`
steps with prompts of each length of --prompts, one length after the other.

With G seconds of generation and T of training, on one GPU or two, and `switch` those of changing sides in
colocated_sync, one_step_overlap can be (G2 + T2 + switch) / max(G1, T1) times as fast. That is the bound.
"""
from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, Mapping, NamedTuple, Optional, Sequence

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from mrl.config.load import load_experiment  # noqa: E402
from mrl.rates import colocated, measured, splits, trained_steps, typical  # noqa: E402
from tools import one_engine  # noqa: E402
from tools.measure import Record, Row, hand_over  # noqa: E402
from tools.workload import SHAPES, random_model  # noqa: E402

GPUS = 2
SHARED, APART = "colocated_sync", "one_step_overlap"
CLUSTERS: Mapping[str, Sequence[str]] = {
    SHARED: (f"cluster.gpus={GPUS}",), APART: ("cluster.trainer_gpus=1", "cluster.rollout_gpus=1")}
PARTITION: Mapping[str, int] = {SHARED: GPUS, APART: 1}
"""GPUs that train, and GPUs that sample, in each mode."""
SWITCH = ("sleep", "wake", "offload", "onload", "sync")
TEMPLATE_TOKENS = 64
"""Room for what the chat template adds to a prompt."""
NO_STEP = 1e-12
"""A learning rate that leaves bfloat16 weights as they are."""


class Timings(NamedTuple):
    """Seconds of the median step of a mode. generation, training: of the GPUs that the mode gives them."""

    step: float
    generation: float
    training: float
    switch: float
    promised: float
    """The step that `mrl check --rates` works out from the run, of its own mode."""


def parse(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    one_engine.add_options(parser)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b", help="of the model")
    parser.add_argument("--vocab", type=int, default=32768, help="tokens of its vocabulary")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs in the engine")
    parser.add_argument("--prompts", type=int, nargs="+", default=[256, 512], help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=4, help="steps with prompts of each length, 4 or more")
    parser.add_argument("--groups", type=int, default=32, help="prompts a step")
    parser.add_argument("--samples", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--mean", type=int, default=128, help="tokens of a response, were it not cut")
    parser.add_argument("--longest", type=int, default=640, help="responses are cut there")
    parser.add_argument("--max-tokens", type=int, default=16384, help="of a microbatch")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each mode, which take turns")
    parser.add_argument("--out", type=Path, help="keep the runs and their logs there")
    parser.add_argument("--json", type=Path, help="append the figures there, as one line of JSON")
    options = parser.parse_args(argv)
    if options.steps < 4:
        parser.error("--steps must be 4 or more: three count for each length of prompts, and the last does not")
    return options


def experiment(options: argparse.Namespace, model: Path, data: Path) -> dict[str, Any]:
    """The experiment file of both modes, as far as they agree."""
    stop = range(options.vocab - round(options.vocab / options.mean), options.vocab)
    return {
        "name": "bench-step", "model": {"path": str(model), "dtype": options.dtype},
        "data": {"train": str(data), "shuffle": False, "max_prompt_tokens": max(options.prompts) + TEMPLATE_TOKENS},
        "reward": {"kind": "length", "full": 0, "zero": options.longest},
        "batch": {"prompts_per_step": options.groups, "samples_per_prompt": options.samples, "minibatches": 2,
                  "max_tokens_per_microbatch": options.max_tokens},
        "algorithm": {"old_log_prob": "recompute"}, "trainer": {"optimizer": {"lr": NO_STEP}},
        "rollout": {"engine": options.engine, "python": options.python, "parallel": {"tp": options.engine_tp},
                    "max_concurrent_requests": options.groups * options.samples,
                    "args": one_engine.arguments(options, graphs=not options.eager),
                    "sampling": {"max_response_tokens": options.longest, "stop_token_ids": list(stop)},
                    "start_timeout_s": options.start_timeout},
        "loop": {"steps": sections(options)[-1].stop - 1},
        "cluster": {"device": options.device},
        "checkpoint": {"every": 0}, "log": {"tensorboard": False, "trajectories_per_step": 0}}


def sections(options: argparse.Namespace) -> list[range]:
    """By length of prompts, the steps (from 1) with batches of it. The first has one more: the run warms up in it."""
    ends = [0, *(1 + options.steps * (count + 1) for count in range(len(options.prompts)))]
    return [range(before + 1, last + 1) for before, last in zip(ends, ends[1:])]


def write_prompts(options: argparse.Namespace, path: Path) -> Path:
    """One prompt of digits a line, which are a token each, as many as the steps take, in order."""
    draw = random.Random(1)
    with open(path, "w", encoding="utf-8") as file:
        for length, steps in zip(options.prompts, sections(options)):
            for _ in range(len(steps) * options.groups):
                prompt = "".join(draw.choices("0123456789", k=length))
                file.write(json.dumps({"prompt": prompt, "answer": ""}) + "\n")
    return path


def train(file: Path, mode: str, folder: Path) -> Path:
    """Run the experiment in this mode. Returns the run directory. SystemExit with the end of its output if it fails."""
    folder.mkdir(parents=True)
    log = folder / "console.log"
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {"OMP_NUM_THREADS": "1", **os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}
    with open(log, "w", encoding="utf-8") as output:
        code = subprocess.run(
            [sys.executable, "-c", "from mrl.cli import main; main()", "train", str(file), f"loop.mode={mode}",
             *CLUSTERS[mode], f"log.dir={folder}"],
            env=env, stdout=output, stderr=subprocess.STDOUT).returncode
    if code:
        raise SystemExit(f"mrl train in mode {mode} ended with exit code {code}:\n{log.read_text()[-4000:]}")
    run_dir, = (path for path in folder.iterdir() if path.is_dir())
    return run_dir


def timings(run_dir: Path, mode: str, section: range) -> Timings:
    """Of the steps of a section but the last, which samples or waits for a batch of the next."""
    steps, gpus = trained_steps(run_dir, section[:-1]), PARTITION[mode]
    # A batch is reported with the step that trains on it, the one after that in which it is sampled.
    rates = measured(run_dir, section[:-1])._replace(generation=measured(run_dir, section[1:]).generation)
    exp = load_experiment(run_dir / "config.yaml")
    promised = colocated(exp, rates, GPUS) if mode == SHARED else splits(exp, rates, GPUS)[0]
    return Timings(typical(steps, ["step"]), rates.generation / gpus, rates.training / gpus, typical(steps, SWITCH),
                   promised.step_s)


def middle(found: Sequence[Timings]) -> Timings:
    """The median of every figure over the rounds."""
    return Timings(*map(median, zip(*found)))


def bound(apart: Timings, shared: Timings) -> float:
    """How many times as fast as `shared` the mode `apart` can be."""
    return (shared.generation + shared.training + shared.switch) / max(apart.generation, apart.training)


def rows(prompt: int, apart: Timings, shared: Timings) -> list[Row]:
    """The figures for prompts of one length."""
    reached, most = shared.step / apart.step, bound(apart, shared)
    idle = {"trainer": apart.step - apart.training, "engine": apart.step - apart.generation}
    return [
        Row(f"prompts of {prompt}: step, {SHARED}", shared.step, "s", notes=f"G2 {shared.generation:.3f}, T2 "
            f"{shared.training:.3f}, switch {shared.switch:.3f}; promised {shared.promised:.3f}"),
        Row(f"prompts of {prompt}: step, {APART}", apart.step, "s", reached, f"step, {SHARED}",
            f"G1 {apart.generation:.3f}, T1 {apart.training:.3f}, sync {apart.switch:.3f}; promised "
            f"{apart.promised:.3f}"),
        Row(f"prompts of {prompt}: bound of that ratio", most, "", reached / most, "bound: share reached",
            "(G2 + T2 + switch) / max(G1, T1)"),
        *(Row(f"prompts of {prompt}: {who} idle, {APART}", seconds, "s", seconds / apart.step, "its step")
          for who, seconds in idle.items())]


def main(argv: Optional[Sequence[str]] = None) -> None:
    options = parse(argv)
    found: dict[tuple[str, int], list[Timings]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        out = folder / "runs" if options.out is None else options.out.resolve()
        model = random_model(folder / "model", options.shape, torch.device(options.device), vocab_size=options.vocab)
        file = folder / "experiment.yaml"
        file.write_text(json.dumps(experiment(options, model, write_prompts(options, folder / "prompts.jsonl"))))
        for turn in range(options.rounds):
            for mode in (SHARED, APART):
                run_dir = train(file, mode, out / f"{mode}-{turn}")
                for prompt, section in zip(options.prompts, sections(options)):
                    found.setdefault((mode, prompt), []).append(timings(run_dir, mode, section))
                    print(f"round {turn + 1} of {options.rounds}, prompts of {prompt}, {mode}: "
                          f"{found[mode, prompt][-1]}", flush=True)
    about = (f"{options.shape} with {options.vocab} tokens, {options.dtype}, {options.engine} on {options.device}; "
             f"{options.groups} prompts x {options.samples} samples, responses of {options.mean} tokens on average, "
             f"longest {options.longest}; medians of {options.steps - 1} steps and {options.rounds} rounds. promised: "
             "the step that `mrl check --rates` works out from the run, of its mode")
    hand_over(Record("bench_step", about, [row for prompt in options.prompts for row in rows(
        prompt, middle(found[APART, prompt]), middle(found[SHARED, prompt]))]), options.json)


if __name__ == "__main__":
    main()
