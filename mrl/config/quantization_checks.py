"""Checks of engines with quantised weights. Pure, as `mrl.config.checks`."""
from __future__ import annotations

from collections.abc import Iterator

from mrl.config.errors import Problem
from mrl.config.schema import Experiment
from mrl.reshard.engine_layout import EngineLayout
from mrl.reshard.fp8 import engine_problems, fp8_problems
from mrl.reshard.spec import ModelSpec


def check_quantization(exp: Experiment, device: str) -> Iterator[Problem]:
    """Whether engines on `device` compute with fp8 weights at all."""
    dtype = exp.model.dtype
    if exp.rollout.quantization and (device == "cpu" or dtype != "bfloat16"):
        yield Problem("rollout.quantization", exp.rollout.quantization, f"null with cluster.device {device} and "
                      f"model.dtype {dtype}: engines compute with fp8 weights in bfloat16, and only on GPUs",
                      "remove it, or use bfloat16 on cuda")


def check_fp8(exp: Experiment, spec: ModelSpec) -> Iterator[Problem]:
    """Whether the model can be quantised in blocks, and engines laid out like this hold whole ones."""
    if problems := fp8_problems(spec):
        yield Problem("rollout.quantization", "fp8", f"null for this model: {'; '.join(problems)}", "remove it")
        return
    parallel = exp.rollout.parallel
    engines = EngineLayout(exp.rollout.engine, tp=parallel.tp, ep=parallel.ep, dp=parallel.dp)
    if parts := engine_problems(spec, engines):
        yield Problem("rollout.parallel.tp", str(parallel.tp), "parts of whole blocks with rollout.quantization fp8, "
                      f"128 x 128 each; engines would have {', '.join(parts)}",
                      "use a smaller tp, or no rollout.quantization")
