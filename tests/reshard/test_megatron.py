"""The family tables against the models that megatron-core really builds, for every rank of every layout."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from mrl.reshard import Layout, local_params

from .simulate import EXPERT_LAYOUTS, LAYOUTS, REPEATED, VARIANTS, hf_config, one_copy, spec_of

ROOT = Path(__file__).resolve().parents[2]
BUILT = [variant for variant in VARIANTS if not spec_of(variant).untrainable and not spec_of(variant).mtp_layers]


def describe(cases: list[tuple[str, Layout, int]]) -> list[dict]:
    """What Megatron builds for (variant, layout, rank)."""
    return ask("megatron_parameters", [(hf_config(variant), asdict(layout), rank) for variant, layout, rank in cases])


def ask(program: str, cases: list) -> list[Any]:
    """The answers of a program beside this file, in one process of its own."""
    run = subprocess.run(
        [sys.executable, "-m", f"tests.reshard.{program}"], env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=ROOT,
        capture_output=True, text=True, input=json.dumps(cases), timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def assert_planned(variant: str, layout: Layout, rank: int, found: dict) -> None:
    planned = local_params(spec_of(variant), layout, layout.coord(rank), te=False)
    # One dtype for all parameters, so for the router too, although it was asked to compute in float32.
    expected = {plan.name: ([*plan.shape], f"torch.{plan.dtype or 'bfloat16'}") for plan in planned}
    assert {name: (shape, dtype) for name, shape, dtype in found["params"]} == expected, (variant, layout, rank)


def test_names_and_shapes_are_megatrons():
    cases = [
        (variant, layout, layout.rank(coord)) for variant in BUILT if not spec_of(variant).moe
        for layout in LAYOUTS for coord in one_copy(layout)
    ]
    for case, found in zip(cases, describe(cases), strict=True):
        assert_planned(*case, found)


def test_experts_are_where_megatron_has_them():
    """Every layout of one stage for one family, one large layout for all."""
    layouts = [layout for layout in EXPERT_LAYOUTS if layout.pp == 1 and layout.ep > 1]
    cases = [
        (variant, layout, rank) for variant in BUILT if spec_of(variant).moe
        for layout in (*(layouts if variant == "qwen2-moe" else []), REPEATED) for rank in range(layout.world)
    ]
    for (variant, layout, rank), found in zip(cases, describe(cases), strict=True):
        assert_planned(variant, layout, rank, found)
        at = layout.expert_coord(layout.coord(rank))
        assert [at.ep, at.etp, at.dp] == found["at"], (layout, rank)
        planned = local_params(spec_of(variant), layout, layout.coord(rank), te=False)
        first = [plan.pieces[0].hf for plan in planned if ".0.mlp.experts." in plan.name and "fc2" in plan.name]
        assert [int(name.split(".experts.")[1].split(".")[0]) for name in first] == found["experts"], (layout, rank)


def test_layers_are_where_megatron_has_them():
    """Every way to cut up to 13 layers over up to 4 stages: mrl refuses what Megatron refuses, and little more."""
    sizes = (None, 1, 2, 3, 4)
    cases = [
        (num_layers, Layout(pp=pp, vpp=vpp, first_stage_layers=first, last_stage_layers=last))
        for num_layers, pp, vpp in product(range(1, 14), (1, 2, 3, 4), (1, 2, 3))
        for first, last in (product(sizes, sizes) if pp > 1 else [(None, None)])
    ]
    placed = 0
    for (num_layers, layout), found in zip(cases, ask("megatron_layers", [(n, asdict(at)) for n, at in cases])):
        problems = layout.pipeline_problems(num_layers)
        if not problems:
            assert found == [
                [[layers.start, len(layers)] for layers in (layout.layers(num_layers, stage, chunk)
                                                            for chunk in range(layout.vpp))]
                for stage in range(layout.pp)
            ], (num_layers, layout)
            placed += 1
        elif found is not None:
            # A stage without a layer, chunks without a pipeline, or the same said twice.
            counts = [count for stage in found for _, count in stage]
            assert min(counts) < 1 or layout.pp == 1 or "say the same" in problems[0], (num_layers, layout, problems)
    assert placed > 100
