"""Megatron against transformers: log-probs, entropy, loss and gradients, for every family and layout.

Each case is one launch that goes through several layouts; the rest of the ranks is data parallel. At tp 4 the tiny models have fewer KV heads than ranks, and ranks whose vocabulary is all padding.
"""
from pathlib import Path

import pytest

from tests.torchrun import torchrun
from tests.trainer.gang import parse_parallel
from tests.trainer.tiny import families

SCRIPT = Path(__file__).parent / "run_layouts.py"


@pytest.mark.parametrize(("ranks", "layouts"), [
    (1, ["tp=1"]),
    (2, ["tp=2", "pp=2", "tp=1", "tp=2,sp=1", "pp=2,vpp=2", "pp=2,first_stage_layers=1"]),
    (4, ["tp=2,pp=2", "tp=2,pp=2,vpp=2,sp=1", "pp=2,vpp=2", "tp=4"]),
], ids=lambda value: f"{value}ranks" if isinstance(value, int) else "")
def test_equal_to_transformers(tiny_models, ranks, layouts):
    output = torchrun(SCRIPT, ranks, tiny_models, *layouts)
    assert output.count("ok ") == sum(len(families(parse_parallel(words))) for words in layouts)
