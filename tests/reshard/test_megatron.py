"""The family tables against the models that megatron-core really builds, for every rank of every layout."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from mrl.reshard import Layout, local_params, model_spec

from .simulate import EXPERT_LAYOUTS, LAYOUTS, REPEATED, VARIANTS, hf_config


def describe(cases: list[tuple[str, Layout, int]]) -> list[dict]:
    """What Megatron builds for (variant, layout, rank), in one process of its own."""
    program = Path(__file__).with_name("megatron_parameters.py")
    run = subprocess.run(
        [sys.executable, str(program)], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        input=json.dumps([(hf_config(variant), asdict(layout), rank) for variant, layout, rank in cases]), timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def assert_planned(variant: str, layout: Layout, rank: int, found: dict) -> None:
    spec, case = model_spec(hf_config(variant)), (variant, layout, rank)
    planned = local_params(spec, layout, layout.coord(rank), te=False)
    assert {name: shape for name, shape, _ in found["params"]} == {plan.name: [*plan.shape] for plan in planned}, case
    # One dtype for all, so for the router too, although it was asked to compute in float32.
    assert {dtype for *_, dtype in found["params"]} == {"torch.bfloat16"}, case


def test_names_and_shapes_are_megatrons():
    cases = [
        (variant, layout, layout.rank(coord)) for variant in VARIANTS if not model_spec(hf_config(variant)).moe
        for layout in LAYOUTS for coord in layout.shards()
    ]
    for case, found in zip(cases, describe(cases), strict=True):
        assert_planned(*case, found)


def test_experts_are_where_megatron_has_them():
    """Every layout of one stage for one family, one large layout for all."""
    layouts = [layout for layout in EXPERT_LAYOUTS if layout.pp == 1 and layout.ep > 1]
    cases = [
        (variant, layout, rank) for variant in VARIANTS if model_spec(hf_config(variant)).moe
        for layout in (*(layouts if variant == "qwen2-moe" else []), REPEATED) for rank in range(layout.world)
    ]
    for (variant, layout, rank), found in zip(cases, describe(cases), strict=True):
        assert_planned(variant, layout, rank, found)
        at = layout.expert_coord(layout.coord(rank))
        assert [at.ep, at.etp, at.dp] == found["at"], (layout, rank)
        planned = local_params(model_spec(hf_config(variant)), layout, layout.coord(rank), te=False)
        first = [plan.pieces[0].hf for plan in planned if ".0.mlp.experts." in plan.name and "fc2" in plan.name]
        assert [int(name.split(".experts.")[1].split(".")[0]) for name in first] == found["experts"], (layout, rank)
