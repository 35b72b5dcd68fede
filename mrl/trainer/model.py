"""Megatron's GPTModel from a Hugging Face config: one pipeline stage, this rank's tensor-parallel shard."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PretrainedConfig

from mrl.config.schema import TrainerParallel
from mrl.reshard import Layout, ModelSpec
from mrl.trainer import megatron_compat
from mrl.trainer.rope import inverse_frequencies


def transformer_config(spec: ModelSpec, parallel: TrainerParallel, dtype: torch.dtype, te: bool) -> TransformerConfig:
    """Megatron's config for a dense decoder with RMS norm, SwiGLU and rotary grouped-query attention, no dropout."""
    return TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden,
        ffn_hidden_size=spec.ffn,
        num_attention_heads=spec.heads,
        num_query_groups=spec.kv_heads,
        kv_channels=spec.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        qk_layernorm=spec.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        # Megatron refuses sequence parallelism without tensor parallelism, where it would do nothing.
        sequence_parallel=parallel.sequence_parallel and parallel.tp > 1,
        # Microbatches are packed to different lengths; stages tell each other the shape first.
        variable_seq_lengths=parallel.pp > 1,
        # Of no effect in dense models, but Megatron checks it against variable_seq_lengths all the same.
        moe_token_dispatcher_type="alltoall",
        # The weights are always loaded, never drawn. (Without perform_initialization, Megatron would also not mark
        # weights as tensor-parallel, and count only rank 0's share in the gradient norm.)
        init_method=_leave,
        output_layer_init_method=_leave,
        embedding_init_method=_leave,
        # The loss arrives already weighted (one weight a token, summing to 1): the gradient is a plain sum.
        calculate_per_token_loss=True,
        # Fused kernels come with Transformer Engine; the others need NVIDIA's apex.
        apply_rope_fusion=te,
        bias_activation_fusion=te,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )


def _leave(weight: torch.Tensor) -> torch.Tensor:
    """An initialisation that does nothing."""
    return weight


def build_model(spec: ModelSpec, hf_config: PretrainedConfig, layout: Layout, config: TransformerConfig,
                te: bool) -> GPTModel:
    """This rank's part of the model, in training mode, its weights not yet loaded. Needs Megatron's parallel state."""
    model = GPTModel(
        config=config,
        transformer_layer_spec=megatron_compat.block_spec(config, te),
        vocab_size=layout.padded_vocab(spec.vocab),
        max_sequence_length=spec.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=spec.tied,
        position_embedding_type="rope",
    )
    model.rotary_pos_emb.inv_freq = inverse_frequencies(hf_config).to(torch.cuda.current_device())
    return model
