"""A batch, through the learner and Megatron, against the formulas: no split, order or layout changes anything."""
from pathlib import Path

import pytest
import torch

from tests.torchrun import torchrun
from tests.trainer.batches import truth
from tests.trainer.tiny import make_model

SCRIPT = Path(__file__).parent / "run_algorithms.py"


@pytest.fixture(scope="module")
def with_references(tiny_models):
    """Beside the models, others of the same families for reference, and what a batch must lead to."""
    for family in ("qwen3", "qwen3_moe"):
        other = make_model(family, tiny_models / "other", seed=11)
        torch.save(truth(tiny_models / family, other), tiny_models / f"learned_{family}.pt")
    return tiny_models


@pytest.mark.parametrize(("ranks", "cases"), [
    (2, ["qwen3:tp=1", "qwen3:tp=2", "qwen3:pp=2", "qwen3:cp=2", "qwen3_moe:ep=2"]),
    pytest.param(4, ["qwen3:tp=2", "qwen3_moe:tp=2,pp=2,sp=1,vpp=2"], marks=pytest.mark.slow),
], ids=["2ranks", "4ranks"])
def test_gradients_and_logged_means(with_references, ranks, cases):
    output = torchrun(SCRIPT, ranks, with_references, *cases)
    assert output.count("ok ") == len(cases)
