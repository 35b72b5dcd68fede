"""Program: builds every rank's real Megatron model, with process groups that only pretend, and prints what it holds.

A process of its own, because the CPU patches that Megatron needs are process-wide.
"""
from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from mrl.platform import get_platform


def parameters(config: dict, tp: int, pp: int, rank: int) -> list[tuple[str, list[int]]]:
    """Names and local shapes of `GPTModel.named_parameters()` on one rank."""
    from mrl.config.schema import TrainerParallel
    from mrl.reshard import Layout, model_spec
    from mrl.trainer.model import build_model, transformer_config
    from mrl.trainer.parallel import enter_layout

    dist.init_process_group("fake", rank=rank, world_size=tp * pp, store=FakeStore())
    spec, parallel = model_spec(config), TrainerParallel(tp=tp, pp=pp)
    enter_layout(parallel, seed=1)
    rope = SimpleNamespace(
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, head_dim=spec.head_dim, hidden_size=spec.hidden,
    )
    config = transformer_config(spec, parallel, torch.float32, te=False)
    model = build_model(spec, rope, Layout(tp=tp, pp=pp), config, te=False)
    found = [(name, list(param.shape)) for name, param in model.named_parameters()]

    from megatron.core import parallel_state
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    get_platform("cpu").install()
    json.dump([parameters(*case) for case in json.load(sys.stdin)], sys.stdout)
