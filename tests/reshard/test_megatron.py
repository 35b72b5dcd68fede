"""The family tables against the models that megatron-core really builds, for every rank of every layout."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from mrl.reshard import local_params, model_spec

from .simulate import LAYOUTS, VARIANTS, hf_config


def test_names_and_shapes_are_megatrons():
    ranks = [(variant, layout, coord) for variant in VARIANTS for layout in LAYOUTS for coord in layout.shards()]
    cases = [(hf_config(variant), layout.tp, layout.pp, layout.rank(coord)) for variant, layout, coord in ranks]
    program = Path(__file__).with_name("megatron_parameters.py")
    run = subprocess.run(
        [sys.executable, str(program)], input=json.dumps(cases), env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300,
    )
    assert run.returncode == 0, run.stderr
    for (variant, layout, coord), found in zip(ranks, json.loads(run.stdout.splitlines()[-1]), strict=True):
        planned = local_params(model_spec(hf_config(variant)), layout, coord, te=False)
        assert dict(found) == {plan.name: [*plan.shape] for plan in planned}, (variant, layout, coord)
