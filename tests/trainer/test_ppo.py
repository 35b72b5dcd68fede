"""PPO with a critic in a real gang: the critic learns first, then both do, the same in every layout."""
from pathlib import Path

from tests.torchrun import torchrun

SCRIPT = Path(__file__).parent / "run_ppo.py"


def test_every_layout_trains_alike(tiny_models):
    layouts = ["tp=1", "tp=2", "pp=2"]
    output = torchrun(SCRIPT, 2, tiny_models / "qwen3", *layouts)
    assert output.count("ok ") == len(layouts)
