"""A small Qwen3-MoE with random weights, its experts dealt out over two GPUs that engines share, and router replay.

Both engines can be tested at the same time on the same GPUs, in two processes: -k vllm and -k sglang."""
import json
from math import isfinite
from pathlib import Path
from statistics import mean

import pytest

from tests.e2e.runs import rows
from tests.gpu.models import SMALL, save_random
from tests.gpu.runs import engine_python, mrl
from tools.make_quickstart import make_problems

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
STEPS, REPLAYED, RESPONSE = 20, 5, 64
ENGINES = {"vllm": ["--gpu-memory-utilization", "0.3", "--kv-cache-memory-bytes", str(4 * 2**30)],
           "sglang": ["--mem-fraction-static", "0.3", "--max-total-tokens", "65536", "--disable-prefill-cuda-graph"]}
"""Little memory, and as much whatever else takes some on these GPUs meanwhile."""
SPREAD = 0.08  # of the weights: wide enough for tokens to prefer some experts to others
EXPERTS = {"num_experts": 32, "num_experts_per_tok": 2}
"""So many that rounding alone sends every sixteenth token of a layer elsewhere, and so few a token that it matters."""
TOLERANCE = 0.2
"""Mean |Δ log p| between two bfloat16 implementations of that model."""


@pytest.fixture(scope="module")
def folder(gpus, tmp_path_factory) -> Path:
    """With a model and prompts."""
    gpus(2)
    return prepare(tmp_path_factory.mktemp("moe"), "cuda")


def prepare(folder: Path, device: str) -> Path:
    """Put the model and prompts into the folder."""
    config = SMALL["qwen3_moe"]()
    config.update({**EXPERTS, "tie_word_embeddings": False})  # SGLang's Qwen3-MoE has an output layer of its own
    file = save_random(config, folder / "model", SPREAD, device) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **EXPERTS}))  # by the names of published models
    problems, _ = make_problems(1)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    return folder


@pytest.fixture(scope="module", params=ENGINES)
def run(request, folder):
    """run(name, *overrides) -> the run directory of `mrl train` with one of the engines."""
    engine = request.param
    python = engine_python(engine)

    def train(name: str, *overrides: str) -> Path:
        out = folder / f"{engine}-{name}"
        print(mrl(folder / f"{engine}-{name}.log", "train", *settings(folder, "cuda"), f"rollout.engine={engine}",
                  f"rollout.python={python}", f"rollout.args={json.dumps(ENGINES[engine])}", f"log.dir={out}",
                  *overrides, timeout_s=400)[-1500:])
        run_dir, = out.iterdir()
        return run_dir

    return train


def settings(folder: Path, device: str) -> list[str]:
    """The experiment, on two GPUs (or as many processes): short responses score more than long ones."""
    return ["configs/quickstart_cpu.yaml", f"cluster.device={device}", "model.dtype=bfloat16",
            f"model.path={folder}/model", f"data.train={folder}/train.jsonl", "eval.every=0",
            f"eval.datasets.heldout.path={folder}/train.jsonl", "loop.mode=colocated_sync", "cluster.gpus=2",
            "cluster.trainer_gpus=null", "cluster.rollout_gpus=null", "trainer.parallel.tp=1", "trainer.parallel.ep=2",
            "trainer.optimizer.lr=1e-5", "reward.kind=null",
            f"reward.parts={{short: {{kind: length, full: 0, zero: {RESPONSE}}}}}",
            f"rollout.sampling.max_response_tokens={RESPONSE}", "sync.verify_every=1", "sync.bucket_mb=16",
            "checkpoint.every=0"]


@pytest.fixture(scope="module")
def own(run) -> Path:
    """The run in which routers choose for themselves."""
    return run("own", f"loop.steps={STEPS}")


def test_every_sync_was_whole_and_verified(own):
    pushes = rows(own, "sync")
    assert [row["sync/version"] for row in pushes] == [f"0:{step}" for step in range(STEPS + 1)]
    assert all(row["sync/verified"] and not row["sync/unverified"] and row["sync/sent_fraction"] == 1
               for row in pushes)


def test_it_trains_and_engines_keep_up(own):
    steps = rows(own, "train")
    differences = [row["rollout/logprob_diff"] for row in steps]
    print("logprob_diff", [round(value, 4) for value in differences])
    assert len(steps) == STEPS and all(isfinite(row["actor/grad_norm"]) and row["actor/grad_norm"] > 0
                                       for row in steps)
    assert all(0 < value < TOLERANCE for value in differences)
    assert mean(differences[STEPS // 2:]) < 1.5 * mean(differences[:STEPS // 2])


def test_replay_brings_trainer_and_engines_closer(run, own):
    """The first batches of both runs are nearly the same: prompts, seeds and weights are."""
    replayed = rows(run("replay", f"loop.steps={REPLAYED}", "trainer.moe_routing=replay"), "train")
    closer, before = ([row["rollout/logprob_diff"] for row in steps][:REPLAYED]
                      for steps in (replayed, rows(own, "train")))
    print(f"logprob_diff with replay {[round(value, 4) for value in closer]}, without "
          f"{[round(value, 4) for value in before]}")
    assert len(closer) == REPLAYED and all(map(isfinite, closer))
    assert mean(closer) < 0.8 * mean(before)
