"""Supervised fine-tuning: packing changes nothing, and the command trains, evaluates, resumes and writes its result."""
from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mrl.config.sft import SftData
from mrl.data.prompts import DataError
from mrl.data.tokenize import PromptEncoder
from mrl.sft.samples import make_samples, share_of
from tests.torchrun import ROOT, torchrun
from tests.trainer.tiny import make_model as make_tiny
from tools.make_quickstart import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(path, seed=0)
    return path


def write_rows(path: Path, pairs) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"{a}+{b}=?", "answer": str(a + b)}) + "\n" for a, b in pairs))
    return path


def test_only_the_answer_and_its_end_are_learnt(model, tmp_path):
    data = SftData(train=str(write_rows(tmp_path / "train.jsonl", [(12, 34)])))
    encoder = PromptEncoder(str(model), data)
    sample, = make_samples(encoder, data.train, data, longest=100)
    learnt = sample["tokens"][sample["loss_mask"]].tolist()
    assert learnt == [*encoder.encode_text("46"), encoder.eos_id]
    assert "12+34=?" in encoder.decode(sample["tokens"][~sample["loss_mask"]].tolist())
    assert len(make_samples(encoder, data.train, data, longest=len(sample["tokens"]))) == 1
    with pytest.raises(DataError, match=r"'12\+34=\?' have .* batch.max_tokens_per_microbatch \(7\)"):
        make_samples(encoder, data.train, data, longest=7)


def test_a_rows_budget_is_filled_and_weights_sum_to_one_over_replicas():
    samples = [{"tokens": torch.zeros(n, dtype=torch.int64), "loss_mask": torch.arange(n) > 0} for n in (3, 5, 2, 6, 4)]
    shares = [share_of(samples, 2, replica, 11) for replica in (0, 1)]
    assert [len(share) for share in shares] == [1, 1]
    packed = [sample for share in shares for microbatch in share for sample in microbatch]
    assert sorted(len(sample["tokens"]) for sample in packed) == [2, 3, 4, 5, 6]
    assert sum(float(sample["token_weight"].sum()) for sample in packed) == pytest.approx(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2])
def test_packed_and_unpacked_give_the_same_gradient(tmp_path, ranks):
    make_tiny("llama", tmp_path)
    torchrun(Path(__file__).parent / "run_packing.py", ranks, tmp_path)


def sft(*arguments, code=0) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", "from mrl.cli import main; main()", "sft", *map(str, arguments)],
                          cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_command_trains_evaluates_resumes_and_writes_a_model(model, tmp_path):
    common = ["configs/quickstart_sft.yaml", f"model.path={model}", "cluster.trainer_gpus=1", "trainer.parallel.tp=1",
              f"data.train={write_rows(tmp_path / 'train.jsonl', [(a, b) for a in range(10, 20) for b in range(9)])}",
              f"data.eval={write_rows(tmp_path / 'heldout.jsonl', [(21, 3), (4, 50)])}", "eval.every=2",
              "checkpoint.every=2", "stop_below=0", "trainer.optimizer.warmup_steps=0", "--run-dir", tmp_path / "run"]
    output = sft(*common, "steps=3", f"out={tmp_path}/first")
    assert "held-out nll after step 0" in output and "step 3/3 nll" in output and f"wrote {tmp_path}/first" in output
    assert "resuming from checkpoint step 3 of 5" in sft(*common, "steps=5", f"out={tmp_path}/second")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2, 3, 4, 5]
    heldout = {row["step"]: row["eval/nll"] for row in rows if row["kind"] == "eval"}
    assert list(heldout) == [0, 2, 3, 4, 5] and all(map(math.isfinite, heldout.values()))
    assert heldout[5] < heldout[0]
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert any(not torch.equal(before[name], tensor) for name, tensor in after.items())
    # What the user can mend is said before anything starts.
    said = sft(*common, "steps=5", f"out={tmp_path}/first", "trainer.parallel.tp=2", "data.eval=null", code=2)
    for key in ("out = ", "cluster.trainer_gpus = 1", "data.eval = "):
        assert key in said, said
