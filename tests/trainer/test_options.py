"""Options that save memory or time: weights, losses and log-probs must be those without them. And router replay."""
from pathlib import Path

from tests.torchrun import torchrun
from tests.trainer.routing import LAYOUTS
from tests.trainer.run_options import CASES

SCRIPT = Path(__file__).parent / "run_options.py"


def test_options_change_no_number(tiny_models):
    output = torchrun(SCRIPT, 4, tiny_models, timeout_s=900)
    assert output.count("ok ") == sum(1 + len(options) for *_, options in CASES.values()) + 2 + len(LAYOUTS)
