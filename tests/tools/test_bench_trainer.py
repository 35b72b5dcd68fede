"""The trainer's benchmark, whole on a tiny model on the CPU, and its arithmetic."""
import json

import pytest

from mrl.reshard.spec import model_spec
from tests.torchrun import ROOT, torchrun
from tools.bench_trainer import flops, make_samples, pad
from tools.workload import SHAPES


def test_every_way_is_timed_on_the_same_tokens(tmp_path):
    output = torchrun(ROOT / "tools" / "bench_trainer.py", 1, "--device", "cpu", "--shape", "tiny", "--samples", "6",
                      "--median", "24", "--longest", "64", "--max-tokens", "256", "--rounds", "1", "--steps", "1",
                      "--json", str(tmp_path / "figures.jsonl"))
    record = json.loads((tmp_path / "figures.jsonl").read_text())
    mine, bare, padded = record["rows"]
    assert mine["value"] / bare["value"] == pytest.approx(mine["ratio"]) and bare["ratio"] == 1
    assert (mine["to"], padded["to"]) == (bare["what"], mine["what"]) and padded["value"] > 0
    assert "MFU" in output


def test_work_is_counted_by_the_usual_formula():
    spec = model_spec(SHAPES["tiny"])
    layer = 128 * (2 * 64 + 2 * 64) + 2 * 64 * 128 + 3 * 128 * 256  # q, k and v; the output; the MLP
    weights = 2 * layer + 512 * 128
    assert flops(spec, [10]) == 6 * weights * 10 + 6 * 2 * 2 * 64 * 100
    assert flops(spec, [10, 20]) == flops(spec, [10]) + flops(spec, [20])
    assert 0.9 < flops(model_spec(SHAPES["qwen2.5-1.5b"]), [1]) / (6 * 1.54e9) < 1.1


def test_padding_does_not_count():
    first, second = make_samples([4, 9], 100)
    assert float(sum(sample["token_weight"].sum() for sample in (first, second))) == pytest.approx(1)
    padded = pad(first, 9)
    assert all(len(field) == 9 for field in padded.values())
    assert float(padded["token_weight"].sum()) == float(first["token_weight"].sum())
    assert not padded["loss_mask"][4:].any()
