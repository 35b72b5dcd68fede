"""The critic on Megatron: the same values and gradients in every layout, and a checkpoint shared with the policy."""
from pathlib import Path

import pytest

from tests.torchrun import torchrun

SCRIPT = Path(__file__).parent / "run_critic.py"


@pytest.mark.parametrize(("ranks", "layouts", "models"), [
    (2, ["tp=2", "pp=2,vpp=2", "tp=1", "cp=2", "tp=2,sp=1,ep=2"], 2 + 3 + 3 + 3 + 1),
    pytest.param(4, ["tp=2,pp=2", "tp=2,pp=2,vpp=2,sp=1,etp=2"], 2 + 1, marks=pytest.mark.slow),
])
def test_equal_to_transformers(tiny_models, ranks, layouts, models):
    output = torchrun(SCRIPT, ranks, tiny_models, "layouts", *layouts)
    assert output.count("ok ") == models


def test_it_trains_and_resumes_beside_the_policy(tiny_models):
    output = torchrun(SCRIPT, 2, tiny_models, "training")
    assert output.count("ok ") == 3
