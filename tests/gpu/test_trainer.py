"""The trainer in bfloat16 on GPUs, Transformer Engine layers where installed, against transformers."""
from pathlib import Path

import pytest
import torch

from tests.gpu.models import LENGTHS, SMALL, qwen3_0_6b, save_random, truth
from tests.gpu.trainer_options import option_checks
from tests.torchrun import torchrun
from tests.trainer.gang import parse_parallel
from tests.trainer.tiny import families, make_batch

pytestmark = pytest.mark.gpu
SCRIPT = Path(__file__).with_name("run_trainer.py")


def prepare(folder: Path, family: str, config, spread: float, gradients: bool, device: str) -> None:
    """A model directory and FAMILY.pt: the batch, with the experts of its tokens, the fp32 truth, and what transformers
    makes of it in bfloat16: log-probs with experts of its own choice, gradients with those."""
    path = save_random(config, folder / family, spread, device)
    batch = make_batch(config.vocab_size, LENGTHS)
    exact = truth(path, batch, torch.float32, device, gradients)
    rough = truth(path, batch, torch.bfloat16, device)
    if experts := exact.pop("experts", None):
        batch = [{**sample, "experts": chosen} for sample, chosen in zip(batch, experts, strict=True)]
    if gradients:
        rough["gradients"] = truth(path, batch, torch.bfloat16, device, gradients)["gradients"]
    torch.save({"batch": batch, **exact, "bfloat16": rough}, folder / f"{family}.pt")


@pytest.fixture(scope="module")
def models(gpus, tmp_path_factory) -> Path:
    """Small models of every family, and one of a real shape."""
    gpus(1)
    folder = tmp_path_factory.mktemp("models")
    for family, config in SMALL.items():
        prepare(folder, family, config(), 0.08, gradients=True, device="cuda")
    prepare(folder, "qwen3_0_6b", qwen3_0_6b(), 0.02, gradients=False, device="cuda")
    return folder


@pytest.mark.parametrize(("ranks", "layouts"), [
    (1, ["tp=1"]),
    (2, ["tp=2", "tp=2,sp=1", "pp=2", "pp=2,vpp=2", "tp=2,sp=1,ep=2", "tp=2,sp=1,etp=2", "cp=2", "cp=2,ep=2"]),
], ids=["1gpu", "2gpus"])
def test_equal_to_transformers(gpus, models, ranks, layouts):
    gpus(ranks)
    output = torchrun(SCRIPT, ranks, models, *layouts, gpus=True, timeout_s=500)
    print("\n".join(line for line in output.splitlines() if line.startswith(("ok ", "time "))))
    failed = [line for line in output.splitlines() if line.startswith("FAILED ")]
    assert not failed, "\n".join(failed)
    # Log-probs and gradients of the small models, log-probs of the larger one; then the options.
    known = [*SMALL, *SMALL, "qwen3_0_6b"]
    expected = sum(len(families(parse_parallel(words), known)) for words in layouts)
    assert output.count("ok ") == expected + (option_checks() if ranks == 2 else 0)
