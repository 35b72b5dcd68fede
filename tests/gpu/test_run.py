"""The main job on GPUs: one trains, one generates, on additions, after a short supervised warm start; both engines."""
import json
from pathlib import Path
from statistics import median

import pytest

from tests.e2e.runs import rows
from tests.gpu.runs import TOLERANCE, engine_python, mrl, warm_start

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
STEPS = 12
ENGINES = {"vllm": ["--enforce-eager", "--gpu-memory-utilization", "0.3"],
           "sglang": ["--disable-cuda-graph", "--mem-fraction-static", "0.3"]}


@pytest.fixture(scope="module")
def warm(gpus, tmp_path_factory) -> tuple[Path, list[str]]:
    """A folder with a model after its warm start and its data; the overrides that both commands share."""
    gpus(2)
    folder = tmp_path_factory.mktemp("run")
    return folder, warm_start(folder)


@pytest.fixture(scope="module", params=ENGINES)
def run(request, warm) -> Path:
    """The run directory."""
    (folder, gpu), engine = warm, request.param
    python = engine_python(engine)
    runs, args = folder / engine, json.dumps(ENGINES[engine])
    print(mrl(folder / f"{engine}.log", "train", "configs/quickstart_cpu.yaml", *gpu, f"model.path={folder}/model",
              f"eval.datasets.heldout.path={folder}/heldout.jsonl",
              "cluster.trainer_gpus=1", "cluster.rollout_gpus=1", f"loop.steps={STEPS}", "eval.every=0",
              "trainer.optimizer.lr=1e-5", "sync.bucket_mb=16", f"rollout.engine={engine}", f"rollout.python={python}",
              f"rollout.args={args}", f"log.dir={runs}", timeout_s=400)[-3000:])
    (run_dir,) = runs.iterdir()
    return run_dir


def test_every_version_was_pushed_once_over_nccl_and_the_first_verified(run):
    pushes = rows(run, "sync")
    assert [row["sync/version"] for row in pushes] == [f"0:{step}" for step in range(STEPS + 1)]
    assert pushes[0]["sync/verified"] and not any(row["sync/verified"] for row in pushes[1:])
    for row in pushes:
        print({key: value if isinstance(value, str) else round(value, 4) for key, value in row.items()})


def test_batches_are_one_step_old_but_for_the_first(run):
    steps = rows(run, "train")
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert [row["rollout/version_lag"] for row in steps] == [0.0] + [1.0] * (STEPS - 1)


def test_trainer_and_engine_agree(run):
    """On the first batch they share weights; after it the samples are one small step old."""
    differences = [row["rollout/logprob_diff"] for row in rows(run, "train")]
    print("logprob_diff", [round(value, 5) for value in differences])
    assert 0 < differences[0] < TOLERANCE


def test_timings_are_all_there(run):
    steps = rows(run, "train")
    for name in sorted(key for key in steps[-1] if key.startswith("timing/")):
        print(f"{name}: median {median(row.get(name, 0.0) for row in steps[1:]):.4f} s")
    assert all(row["timing/step"] > 0 for row in steps)
