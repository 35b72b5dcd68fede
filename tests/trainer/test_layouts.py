"""Megatron against transformers: log-probs, entropy, loss, gradients and their norm, for every family and layout.

Each case is one launch that goes through several layouts; the rest of the ranks is data parallel. At tp 4 the tiny
models have fewer KV heads than ranks, and ranks whose vocabulary is all padding. On four ranks every layout sees every
second family, and all of them with --all.
"""
from pathlib import Path

import pytest
import torch

from mrl.platform import get_platform
from mrl.reshard import model_spec, read_config
from tests.torchrun import torchrun
from tests.trainer.gang import experiment, parse_parallel
from tests.trainer.run_layouts import PARTS
from tests.trainer.tiny import families

SCRIPT = Path(__file__).parent / "run_layouts.py"


FOUR = ["tp=2,pp=2", "tp=2,pp=2,vpp=2,sp=1,ep=2", "tp=4", "ep=2", "ep=2,etp=2", "tp=2,sp=1,ep=2,etp=2",
        "pp=2,etp=2,first_stage_layers=3", "tp=2,cp=2,sp=1", "cp=2,pp=2,ep=2"]


@pytest.mark.parametrize(("ranks", "part", "layouts"), [
    (1, "all", ["tp=1"]),
    (2, "all", ["tp=2", "pp=2", "tp=1", "tp=2,sp=1", "pp=2,vpp=2", "pp=2,first_stage_layers=1", "ep=2",
                "tp=2,sp=1,ep=2", "etp=2", "tp=2,sp=1,etp=2", "cp=2"]),
    pytest.param(4, "even", FOUR, marks=pytest.mark.slow),
    pytest.param(4, "odd", FOUR, marks=pytest.mark.long),
], ids=["1rank", "2ranks", "4ranks", "4ranks-rest"])
def test_equal_to_transformers(tiny_models, ranks, part, layouts):
    output = torchrun(SCRIPT, ranks, tiny_models, part, *layouts)
    assert output.count("ok ") == sum(len(PARTS[part](number, families(parse_parallel(words))))
                                      for number, words in enumerate(layouts))


def test_the_load_balancing_loss_is_that_of_its_paper(tiny_models):
    layouts = ["tp=2,sp=1", "ep=2", "pp=2,vpp=2"]
    output = torchrun(SCRIPT.with_name("run_balance.py"), 2, tiny_models, *layouts)
    assert output.count("ok ") == len(layouts)


def test_experts_need_sequence_parallelism(tiny_models):
    """What `mrl check` finds, for those who start a trainer without it."""
    get_platform("cpu").install()
    from mrl.trainer.model import transformer_config

    spec = model_spec(read_config(tiny_models / "mixtral"))
    section = experiment(tiny_models / "mixtral", {"tp": 2}).trainer
    with pytest.raises(ValueError, match="trainer.parallel.sequence_parallel is false, but with trainer.parallel.tp 2"):
        transformer_config(spec, section, torch.float32, te=False)
