"""Program: builds every rank's real Megatron model, with process groups that only pretend, and prints what it holds.

A process of its own, because the CPU patches that Megatron needs are process-wide.
"""
from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from mrl.platform import get_platform

DTYPE = torch.bfloat16


def describe(config: dict, sizes: dict, rank: int) -> dict[str, Any]:
    """Names, local shapes and dtypes of all weights of one rank, as the trainer builds it; its place among experts."""
    from megatron.core import parallel_state

    from mrl.config.trainer import Trainer, TrainerParallel
    from mrl.reshard import Layout, chunk_prefix, model_spec
    from mrl.trainer.model import build_chunks, transformer_config
    from mrl.trainer.parallel import enter_layout

    spec, layout = model_spec(config), Layout(**sizes)
    dist.init_process_group("fake", rank=rank, world_size=layout.world, store=FakeStore())
    sizes = {name: size for name, size in sizes.items() if name in TrainerParallel.model_fields}
    section = Trainer(parallel=TrainerParallel(**sizes, sequence_parallel=layout.tp > 1))
    place = enter_layout(section.parallel, seed=1)
    rope = SimpleNamespace(
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, head_dim=spec.head_dim, hidden_size=spec.hidden,
    )
    chunks = build_chunks(spec, rope, place, transformer_config(spec, section, DTYPE, te=False), te=False,
                          ends_in="logits")
    found = {
        "params": [(chunk_prefix(layout, index) + name, list(tensor.shape), str(tensor.dtype))
                   for index, chunk in enumerate(chunks) for name, tensor in chunk.state_dict().items()
                   if tensor is not None and "_extra_state" not in name],
        "at": [parallel_state.get_expert_model_parallel_rank(), parallel_state.get_expert_tensor_parallel_rank(),
               parallel_state.get_expert_data_parallel_rank()],
        "experts": getattr(chunks[0].decoder.layers[-1].mlp, "local_expert_indices", []),
    }
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    get_platform("cpu").install()
    from mrl.trainer import megatron_compat

    megatron_compat.install()
    json.dump([describe(*case) for case in json.load(sys.stdin)], sys.stdout)
