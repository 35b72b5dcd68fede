"""The step benchmark without engines: its experiment, which steps count, and the arithmetic of bounds and bubbles."""
import json

import pytest
import torch

from mrl.config.load import load_experiment
from tools import bench_step
from tools.bench_step import APART, CLUSTERS, SHARED, Timings
from tools.workload import random_model

WORDS = ["--python", "python", "--device", "cpu", "--shape", "tiny", "--vocab", "512", "--prompts", "20", "50",
         "--groups", "2", "--samples", "3", "--mean", "16", "--longest", "80"]


@pytest.fixture
def options():
    return bench_step.parse(WORDS)


@pytest.fixture
def file(options, tmp_path):
    model = random_model(tmp_path / "model", options.shape, torch.device("cpu"), vocab_size=options.vocab)
    path = tmp_path / "experiment.yaml"
    prompts = bench_step.write_prompts(options, tmp_path / "prompts.jsonl")
    path.write_text(json.dumps(bench_step.experiment(options, model, prompts)))
    return path


def run_of(folder, file, mode: str, steps: list[dict]):
    folder.mkdir()
    exp = load_experiment(file, [f"loop.mode={mode}", *CLUSTERS[mode]])
    (folder / "config.yaml").write_text(exp.model_dump_json())
    lines = [{"kind": "train", "step": number, **step} for number, step in enumerate(steps, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_prompts_of_each_length_fill_its_steps_in_order(options, file):
    first, second = bench_step.sections(options)
    assert (first, second) == (range(1, 6), range(6, 10))
    exp = load_experiment(file, ["loop.mode=colocated_sync", "cluster.gpus=2"])
    lengths = [len(json.loads(line)["prompt"]) for line in open(exp.data.train)]
    assert lengths == [20] * (5 * 2) + [50] * (4 * 2) and exp.loop.steps == 9 and not exp.data.shuffle
    stop = exp.rollout.sampling.stop_token_ids
    assert len(stop) == 512 / 16 and max(stop) == 511  # one token in 16 ends a response
    with pytest.raises(SystemExit):
        bench_step.parse([*WORDS, "--steps", "3"])


def test_the_first_step_and_the_last_of_a_length_do_not_count(options, file, tmp_path):
    """Nor does the sampling of the first batch of a length, in a step of the length before."""
    def step(seconds: float, training: float, generation: float = 4) -> dict:
        return {"timing/step": seconds, "timing/generate_sequences": generation, "timing/old_log_prob": training / 4,
                "timing/update_actor": training * 3 / 4, "timing/sync": 0.25, "timing/sleep": 0.5, "timing/wake": 0.25}

    steps = [step(100, 50), step(8, 2), step(8, 2), step(8, 2), step(90, 2), step(12, 6, 60), step(12, 6),
             step(12, 6), step(70, 6)]
    shared = run_of(tmp_path / "shared", file, SHARED, steps)
    apart = run_of(tmp_path / "apart", file, APART, steps)
    first, second = bench_step.sections(options)
    assert bench_step.timings(shared, SHARED, first) == Timings(8, 4, 2, 1, promised=4 + 2 + 0.25)
    assert bench_step.timings(shared, SHARED, second) == Timings(12, 4, 6, 1, promised=4 + 6 + 0.25)
    assert bench_step.timings(apart, APART, first) == Timings(8, 4, 2, 1, promised=4 + 0.25)
    assert bench_step.timings(apart, APART, second) == Timings(12, 4, 6, 1, promised=6 + 0.25)


def test_bound_reached_and_bubbles():
    shared = Timings(step=8.0, generation=3.5, training=2.5, switch=1.5, promised=7.0)
    apart = Timings(step=6.0, generation=4.0, training=5.0, switch=0.25, promised=5.25)
    assert bench_step.bound(apart, shared) == 1.5  # 7.5 s of work in 5
    slow, fast, most, trainer, engine = bench_step.rows(256, apart, shared)
    assert (slow.value, fast.value, fast.ratio) == (8.0, 6.0, pytest.approx(8 / 6))
    assert (most.value, most.ratio) == (1.5, pytest.approx(8 / 6 / 1.5))
    assert (trainer.value, trainer.ratio) == (1.0, pytest.approx(1 / 6))
    assert (engine.value, engine.ratio) == (2.0, pytest.approx(2 / 6))


def test_rounds_count_by_their_median():
    rounds = [Timings(*[float(value)] * 5) for value in (3, 1, 9)]
    assert bench_step.middle(rounds) == Timings(3, 3, 3, 3, 3)
