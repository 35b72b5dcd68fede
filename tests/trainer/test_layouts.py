"""Megatron against transformers: log-probs, entropy, loss and gradients, for every family and layout.

Each case is one launch that goes through several layouts, given as tp,pp,sequence_parallel; the rest of the ranks is
data parallel. At tp 4 the tiny models have fewer KV heads than ranks, and ranks whose vocabulary is all padding.
"""
from pathlib import Path

import pytest

from tests.torchrun import torchrun
from tests.trainer.tiny import CONFIGS

SCRIPT = Path(__file__).parent / "run_layouts.py"


@pytest.mark.parametrize(("ranks", "layouts"), [
    (1, ["1,1,0"]),
    (2, ["2,1,0", "1,2,0", "1,1,0", "2,1,1"]),
    (4, ["2,2,0", "2,2,1", "1,2,0", "4,1,0"]),
], ids=lambda value: f"{value}ranks" if isinstance(value, int) else "")
def test_equal_to_transformers(tiny_models, ranks, layouts):
    output = torchrun(SCRIPT, ranks, tiny_models, *layouts)
    assert output.count("ok ") == len(layouts) * len(CONFIGS)
