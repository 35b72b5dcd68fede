"""Program: builds every rank's real Megatron model, with process groups that only pretend, and prints what it holds.

A process of its own, because the CPU patches that Megatron needs are process-wide.
"""
from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from mrl.platform import get_platform

DTYPE = torch.bfloat16


def describe(config: dict, sizes: dict, rank: int) -> dict[str, Any]:
    """Names, local shapes and dtypes of `GPTModel.named_parameters()` on one rank; its place among the experts."""
    from megatron.core import parallel_state

    from mrl.config.schema import TrainerParallel
    from mrl.reshard import Layout, model_spec
    from mrl.trainer.model import transformer_config

    spec, layout = model_spec(config), Layout(**sizes)
    dist.init_process_group("fake", rank=rank, world_size=layout.world, store=FakeStore())
    build = expert_model if spec.moe else dense_model
    parallel = TrainerParallel(tp=layout.tp, pp=layout.pp)
    model = build(spec, layout, parallel, transformer_config(spec, parallel, DTYPE, te=False))
    found = {
        "params": [(name, list(param.shape), str(param.dtype)) for name, param in model.named_parameters()],
        "at": [parallel_state.get_expert_model_parallel_rank(), parallel_state.get_expert_tensor_parallel_rank(),
               parallel_state.get_expert_data_parallel_rank()],
        "experts": model.decoder.layers[0].mlp.local_expert_indices if spec.moe else [],
    }
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return found


def dense_model(spec, layout, parallel, config):
    """As the trainer builds it."""
    from mrl.trainer.model import build_model
    from mrl.trainer.parallel import enter_layout

    enter_layout(parallel, seed=1)
    rope = SimpleNamespace(
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, head_dim=spec.head_dim, hidden_size=spec.hidden,
    )
    return build_model(spec, rope, layout, config, te=False)


def expert_model(spec, layout, parallel, config):
    """With Megatron's own layer spec for experts."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    from mrl.trainer.local_layers import RMSNorm

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep, expert_tensor_parallel_size=layout.etp, create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = replace(
        config, num_moe_experts=spec.moe.num_experts, moe_router_topk=spec.moe.top_k, moe_ffn_hidden_size=spec.moe.ffn,
        moe_shared_expert_intermediate_size=spec.moe.shared_ffn, moe_shared_expert_gate=spec.moe.shared_ffn is not None,
        moe_router_dtype="fp32", expert_model_parallel_size=layout.ep, expert_tensor_parallel_size=layout.etp,
        sequence_parallel=layout.tp > 1,
    )
    layer = get_gpt_layer_local_spec(
        num_experts=spec.moe.num_experts, moe_grouped_gemm=False, qk_layernorm=spec.qk_norm, normalization="RMSNorm",
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    if spec.qk_norm:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules([layer] * get_num_layers_to_build(config), RMSNorm),
        vocab_size=layout.padded_vocab(spec.vocab), max_sequence_length=spec.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=spec.tied, position_embedding_type="rope",
    )


if __name__ == "__main__":
    get_platform("cpu").install()
    json.dump([describe(*case) for case in json.load(sys.stdin)], sys.stdout)
