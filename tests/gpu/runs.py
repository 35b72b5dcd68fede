"""Runs on GPUs: mrl as a user calls it, and a model that knows some of its task after a supervised warm start."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import PROJECT
from tests.gpu.models import addition_model, save_random
from tools.make_quickstart import make_problems

TOLERANCE = 0.03
"""Mean |Δ log p| between two bfloat16 implementations of one model."""


def mrl(log: Path, *arguments: str, timeout_s: float) -> str:
    """What the command prints, in the project's folder; AssertionError with the end of that when it fails."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", "from mrl.cli import main; main()", *arguments]
    with open(log, "w", encoding="utf-8") as file:
        code = subprocess.run(command, cwd=PROJECT, env=env, stdout=file, stderr=subprocess.STDOUT,
                              timeout=timeout_s).returncode
    assert code == 0, f"exit code {code}\n{log.read_text()[-4000:]}"
    return log.read_text()


def warm_start(folder: Path) -> list[str]:
    """Put a model and its data, train.jsonl and heldout.jsonl, into the folder: overrides for runs with them."""
    for name, problems in zip(("train", "heldout"), make_problems(1)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    save_random(addition_model(), folder / "init", 0.02, "cuda")
    gpu = ["cluster.device=cuda", "model.dtype=bfloat16", "trainer.parallel.tp=1", f"data.train={folder}/train.jsonl"]
    print(mrl(folder / "sft.log", "sft", "configs/quickstart_sft.yaml", *gpu, "cluster.trainer_gpus=1",
              f"model.path={folder}/init", f"out={folder}/model", f"log.dir={folder}/sft", "steps=150",
              "batch.samples_per_step=128", "trainer.optimizer.lr=5e-4", timeout_s=200)[-400:])
    return gpu


def engine_python(engine: str) -> Path:
    """Python of the engine's environment; skips the test where there is none."""
    python = Path(os.environ.get("MRL_HOME", PROJECT / ".mrl")) / engine / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no {python}")
    return python
