"""A bare megatron-core training loop, as its own examples have it: what mrl is measured against.

Megatron's model, its fused cross-entropy, schedule, gradient buffers and distributed optimizer, and nothing else: rows
are packed beforehand, no metrics are kept. Needs Megatron's parallel state.
"""
from __future__ import annotations

from functools import partial
from typing import Any, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from mrl.platform import Platform
from mrl.trainer.local_layers import PackedSequences
from mrl.trainer.megatron_compat import block_spec
from mrl.trainer.microbatch import Packed

VOCAB_UNIT = 128


def transformer_config(hf: Mapping[str, Any], te: bool, tp: int) -> TransformerConfig:
    """Megatron's config of a dense Qwen2 or Qwen3, from what its config.json says."""
    heads = hf["num_attention_heads"]
    return TransformerConfig(
        num_layers=hf["num_hidden_layers"], hidden_size=hf["hidden_size"], ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=heads, num_query_groups=hf["num_key_value_heads"],
        kv_channels=hf.get("head_dim", hf["hidden_size"] // heads), normalization="RMSNorm",
        layernorm_epsilon=hf["rms_norm_eps"], gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False,
        add_qkv_bias=hf["model_type"] == "qwen2", qk_layernorm=hf["model_type"] == "qwen3", hidden_dropout=0.0,
        attention_dropout=0.0, bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16,
        tensor_model_parallel_size=tp, sequence_parallel=tp > 1, calculate_per_token_loss=True, apply_rope_fusion=te,
        bias_activation_fusion=te, cross_entropy_loss_fusion=te, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False)


class MegatronLoop:
    """`train` is one optimizer step. `weights`: by Megatron's names, what the model begins with."""

    def __init__(self, hf: Mapping[str, Any], weights: Mapping[str, torch.Tensor], platform: Platform, tp: int,
                 lr: float):
        self.platform = platform
        self.config = transformer_config(hf, platform.uses_te, tp)
        unit = VOCAB_UNIT * tp
        model = GPTModel(
            config=self.config, transformer_layer_spec=block_spec(self.config, platform.uses_te, None),
            vocab_size=-(-hf["vocab_size"] // unit) * unit, max_sequence_length=hf["max_position_embeddings"],
            share_embeddings_and_output_weights=hf["tie_word_embeddings"], position_embedding_type="rope",
            rotary_base=hf["rope_theta"]).to(platform.device())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
        self.model = DistributedDataParallel(self.config, DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True), model)
        self.config.finalize_model_grads_func = finalize_model_grads
        self.optimizer = get_megatron_optimizer(OptimizerConfig(
            optimizer="adam", lr=lr, weight_decay=0.01, adam_beta1=0.9, adam_beta2=0.95, clip_grad=1.0, bf16=True,
            params_dtype=torch.bfloat16, use_distributed_optimizer=True), [self.model], use_gloo_process_groups=False)

    def train(self, rows: Sequence[Packed]) -> float:
        """One step on the mean cross-entropy of every next token. Returns it, of this data-parallel replica."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=self._forward, model=[self.model], data_iterator=iter(rows), num_microbatches=len(rows),
            seq_length=max(len(row.tokens) for row in rows), micro_batch_size=1, forward_only=False)
        self.optimizer.step()
        loss, tokens = torch.stack([report["loss"] for report in reports]).sum(0).tolist()
        return loss / tokens

    def _forward(self, rows: Iterator[Packed], model) -> tuple[torch.Tensor, partial]:
        row = next(rows).to(self.platform.device())
        labels = row.tokens.roll(-1)
        starts = torch.zeros_like(row.tokens, dtype=torch.bool).index_fill_(0, row.cu_seqlens[:-1].long(), True)
        real = torch.zeros_like(starts).index_fill_(0, row.places, True)
        counts = real.roll(-1) & ~starts.roll(-1)
        sequences = PackedSequences(qkv_format="thd", cu_seqlens_q=row.cu_seqlens, cu_seqlens_kv=row.cu_seqlens,
                                    max_seqlen_q=row.longest, max_seqlen_kv=row.longest)
        losses = model(row.tokens[None], row.position_ids[None], None, labels=labels[None],
                       packed_seq_params=sequences)
        return losses, partial(self._loss, counts)

    def _loss(self, counts: torch.Tensor, losses: torch.Tensor) -> tuple:
        loss, tokens = (losses.view(-1) * counts).sum(), counts.sum().int()
        return loss, tokens, {"loss": torch.stack([loss.detach(), tokens.to(loss.dtype)])}
