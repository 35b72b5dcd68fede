"""Megatron's GPTModel from a Hugging Face config: the chunks of this rank's pipeline stage, its part of each."""
from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from transformers import PretrainedConfig

from mrl.config.trainer import Trainer as TrainerSection
from mrl.reshard import ModelSpec, is_expert
from mrl.trainer import megatron_compat
from mrl.trainer.heads import HiddenStates, ValueHead
from mrl.trainer.parallel import Place
from mrl.trainer.rope import inverse_frequencies


def transformer_config(spec: ModelSpec, section: TrainerSection, dtype: torch.dtype, te: bool) -> TransformerConfig:
    """Megatron's config for a decoder with RMS norm, SwiGLU and rotary attention, grouped or latent, no dropout.

    Raises:
        ValueError: experts under tensor parallelism without sequence parallelism.
    """
    parallel = section.parallel
    config_class = MLATransformerConfig if spec.mla else TransformerConfig
    return config_class(
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
        # In latent attention it stands for the norms of the latents, which are always there.
        qk_layernorm=spec.qk_norm or spec.mla is not None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=parallel.tp,
        context_parallel_size=parallel.cp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        num_layers_in_first_pipeline_stage=parallel.first_stage_layers,
        num_layers_in_last_pipeline_stage=parallel.last_stage_layers,
        # Of two stages with several chunks each is before and behind the other: in a batch of transfers Megatron could
        # not tell the directions apart.
        overlap_p2p_comm=parallel.vpp > 1,
        batch_p2p_comm=parallel.vpp == 1,
        # Megatron refuses sequence parallelism without tensor parallelism, where it would do nothing.
        sequence_parallel=parallel.sequence_parallel and parallel.tp > 1,
        # Microbatches are packed to different lengths; stages tell each other the shape first.
        variable_seq_lengths=parallel.pp > 1,
        # The weights are always loaded, never drawn. (Without perform_initialization, Megatron would also not mark
        # weights as tensor-parallel, and count only rank 0's share in the gradient norm.)
        init_method=_leave,
        output_layer_init_method=_leave,
        embedding_init_method=_leave,
        # The loss arrives already weighted (one weight a token, summing to 1): the gradient is a plain sum.
        calculate_per_token_loss=True,
        # Rotation is a kernel of Transformer Engine's; SwiGLU, and the sum with the residual, are compiled by torch.
        apply_rope_fusion=te and spec.mla is None,
        bias_activation_fusion=te,
        bias_dropout_fusion=te,
        # The output layer, which is not Transformer Engine's, takes apex for it.
        gradient_accumulation_fusion=te and megatron_compat.HAS_APEX_WEIGHT_GRADIENT,
        # Of attention that computes its scores one after the other, which neither platform has.
        masked_softmax_fusion=False,
        **_recompute_settings(spec, section),
        **_expert_settings(spec, section, te),
        **_latent_settings(spec),
    )


def _recompute_settings(spec: ModelSpec, section: TrainerSection) -> dict[str, Any]:
    """What is not kept for the backward pass."""
    if section.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "block",
                "recompute_num_layers": section.recompute_layers or spec.num_layers}
    if section.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": [*section.recompute_modules]}
    return {}


def _expert_settings(spec: ModelSpec, section: TrainerSection, te: bool) -> dict[str, Any]:
    """What Megatron is told about experts; of a dense model, what it checks against variable_seq_lengths."""
    moe, parallel = spec.moe, section.parallel
    if moe is None:
        return {"moe_token_dispatcher_type": "alltoall"}
    if parallel.tp > 1 and not parallel.sequence_parallel:
        raise ValueError("trainer.parallel.sequence_parallel is false, but with trainer.parallel.tp "
                         f"{parallel.tp} the experts of {spec.family.architecture} need it; set it to true")
    return {
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": moe.ffn,
        "moe_shared_expert_intermediate_size": moe.shared_ffn,
        "moe_shared_expert_gate": moe.shared_gate,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
        "moe_router_topk": moe.top_k,
        # A softmax over the chosen experts alone is that over all of them, scaled to sum to 1.
        "moe_router_pre_softmax": not moe.norm_topk_prob,
        "moe_router_dtype": "fp32",
        # Its weight depends on the batch: see `Trainer`.
        "moe_router_load_balancing_type": "aux_loss" if section.moe.aux_loss_coef else "none",
        "moe_router_score_function": moe.scoring,
        "moe_router_topk_scaling_factor": moe.scaling,
        "moe_router_num_groups": moe.groups if moe.groups > 1 else None,
        "moe_router_group_topk": moe.top_groups if moe.groups > 1 else None,
        # The bias stays as pre-training left it: the engines would not see it move during a step.
        "moe_router_enable_expert_bias": moe.bias,
        "moe_router_bias_update_rate": 0.0,
        "moe_layer_freq": [int(layer >= moe.dense_layers) for layer in range(spec.num_layers)],
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": te,
        "moe_permute_fusion": te,
    }


def _latent_settings(spec: ModelSpec) -> dict[str, Any]:
    """What Megatron is told about latent attention. Its frequencies are set later; yarn also scales the softmax."""
    mla, yarn = spec.mla, spec.rope_scaling or {}
    if mla is None:
        return {}
    return {
        "q_lora_rank": mla.q_rank,
        "kv_lora_rank": mla.kv_rank,
        "qk_head_dim": mla.nope_dim,
        "qk_pos_emb_head_dim": mla.rope_dim,
        "v_head_dim": mla.v_dim,
        "rope_type": "rope",
        "rotary_scaling_factor": yarn.get("factor", 1.0),
        "mscale_all_dim": yarn.get("mscale_all_dim") or 0.0,
    }


def _leave(weight: torch.Tensor) -> torch.Tensor:
    """An initialisation that does nothing."""
    return weight


def build_chunks(spec: ModelSpec, hf_config: PretrainedConfig, place: Place, config: TransformerConfig, te: bool,
                 ends_in: Literal["logits", "hidden", "value"]) -> list[GPTModel]:
    """This rank's parts of the model, in training mode, their weights not yet loaded. Needs Megatron's parallel state.

    One for each virtual pipeline stage, in order. `ends_in`: what the last one says of each token; "value": a critic.
    """
    device = torch.cuda.current_device()
    frequencies = inverse_frequencies(hf_config).to(device)
    layout, chunks = place.layout, []
    for chunk in range(layout.vpp):
        vp_stage = chunk if layout.vpp > 1 else None
        model = GPTModel(
            config=config,
            transformer_layer_spec=megatron_compat.block_spec(config, te, vp_stage),
            vocab_size=layout.padded_vocab(spec.vocab),
            max_sequence_length=spec.max_positions,
            pre_process=layout.has_embedding(place.coord, chunk),
            post_process=layout.has_output(place.coord, chunk),
            share_embeddings_and_output_weights=spec.tied and ends_in != "value",
            position_embedding_type="rope",
            rotary_percent=spec.rotary_fraction,
            vp_stage=vp_stage,
        )
        if model.post_process and ends_in == "value":
            model.output_layer = ValueHead(config)
        if model.post_process and ends_in == "hidden":
            model.output_layer = HiddenStates(model.output_layer)
        megatron_compat.set_frequencies(model, frequencies)
        megatron_compat.gather_latents(model)
        model.to(device)  # Megatron makes the weights of routers and of shared experts' gates on the host
        _mark_experts(model)
        chunks.append(model)
    return chunks


def _mark_experts(model: GPTModel) -> None:
    """Tell Megatron that expert parameters are reduced over their own data-parallel groups, and are nobody's copy.

    By itself it decides the first by ep alone, which is wrong where etp differs from tp; and without the second, under
    Transformer Engine, the gradient norm would leave out the experts of all but the first tensor-parallel ranks.
    """
    for name, param in model.named_parameters():
        if is_expert(name):
            param.allreduce = False
            param.tensor_model_parallel = True
