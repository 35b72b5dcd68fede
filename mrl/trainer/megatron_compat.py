"""The one place where versions of megatron-core differ, and where mrl changes Megatron on every platform.

Supported: 0.16 (the newest for Python 3.11) to 0.19 (Python 3.12). `platform.install()` must have run before this
module is imported.
"""
from __future__ import annotations

from typing import Any

import megatron.core
import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import MegatronOptimizer, optimizer_config
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.tensor_parallel import layers as tensor_parallel_layers
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import get_te_version

from mrl.trainer.context import rows_of
from mrl.trainer.local_layers import RMSNorm, SDPACoreAttention

SUPPORTED = ((0, 16), (0, 19))
HAS_APEX_WEIGHT_GRADIENT: bool = tensor_parallel_layers._grad_accum_fusion_available
"""Whether the kernel of apex is installed that adds a weight's gradient to the flat buffer as it is computed."""


def install() -> None:
    """Check the version and change what mrl needs changed on every platform. Idempotent.

    Raises:
        RuntimeError: a megatron-core outside the supported range.
    """
    version = tuple(int(part) for part in megatron.core.__version__.split(".")[:2])
    if not SUPPORTED[0] <= version <= SUPPORTED[1]:
        raise RuntimeError(f"megatron-core {megatron.core.__version__} is installed; supported: 0.16 to 0.19")
    # Megatron slices the tensor once per sequence, per layer, with a device synchronisation each time.
    rope_utils._apply_rotary_pos_emb_thd = rotary_of_packed
    # 0.16 asks whether Transformer Engine's function is None, and never defines it where that is not installed.
    vars(moe_utils).setdefault("te_general_gemm", None)
    # Versions disagree about its weight under sequence parallelism, and each keeps a log of it that nothing empties.
    TopKRouter.attach_and_log_load_balancing_loss = attach_balance_loss
    # 0.16 takes it for installed where its own module about it can be imported, which then holds stand-ins.
    multi_latent_attention.HAVE_TE = isinstance(multi_latent_attention.TELinear, type)


def rotary_of_packed(t: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, rotary_interleaved: bool = False,
                     mscale: float = 1.0, cp_group: Any = None, **interleaved: bool) -> torch.Tensor:
    """Rotary embedding of packed sequences, positions restarting with each.

    Args:
        t: [tokens, heads, d] queries or keys.
        cu_seqlens: int32 [sequences + 1], where each sequence starts in the whole row; the last is its length.
        freqs: [at least the longest sequence, 1, 1, d] angles by position.
        cp_group: the context-parallel group over which the row is dealt, if it is.
        interleaved: whether the dimensions of latent attention alternate, under the name it has in this version.
    """
    cp = 1 if cp_group is None else cp_group.size()
    position = positions(cu_seqlens, cp * t.shape[0])
    if cp > 1:
        position = position[rows_of(cu_seqlens, len(position), cp, cp_group.rank())]
    return rope_utils._apply_rotary_pos_emb_bshd(
        t.unsqueeze(1), freqs.index_select(0, position), rotary_interleaved=rotary_interleaved, mscale=mscale,
        **interleaved,
    ).squeeze(1)


def attach_balance_loss(self: TopKRouter, probs: torch.Tensor, coef: float, loss: torch.Tensor, *_: Any,
                        **__: Any) -> torch.Tensor:
    """`probs` as they are, with the gradient of a microbatch's load-balancing loss, times its tokens, added to theirs.

    Args:
        probs: [tokens of this rank, experts] routing weights.
        loss: this rank's share: the sum over the tensor-parallel ranks is the microbatch's, `coef` applied.
    """
    return MoEAuxLossAutoScaler.apply(probs, loss * len(probs) * self.tp_cp_group.size())


def positions(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """int64 [tokens]: index of each token inside its sequence."""
    index = torch.arange(tokens, device=cu_seqlens.device)
    sequence = torch.bucketize(index, cu_seqlens[1:].long(), right=True)
    return index - cu_seqlens.long()[sequence]


def block_spec(config, te: bool, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage, or of one chunk of it, and the final norm."""
    if te:
        from megatron.core.extensions.transformer_engine import TENorm

        make, norm = _te_layer, TENorm
    else:
        make, norm = _local_layer, RMSNorm
    kinds = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers
    specs = {kind: make(config, config.num_moe_experts if kind else None) for kind in set(kinds)}
    first = get_transformer_layer_offset(config, vp_stage)
    layers = range(first, first + get_num_layers_to_build(config, vp_stage))
    return TransformerBlockSubmodules(layer_specs=[specs[kinds[layer]] for layer in layers], layer_norm=norm)


def _te_layer(config, num_experts: int | None) -> ModuleSpec:
    return get_gpt_layer_with_transformer_engine_spec(
        num_experts=num_experts, moe_grouped_gemm=True, qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention)


def _local_layer(config, num_experts: int | None) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=num_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm",
        multi_latent_attention=config.multi_latent_attention)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = SDPACoreAttention
    if config.multi_latent_attention:
        attention.q_layernorm = attention.kv_layernorm = RMSNorm
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return layer


def set_frequencies(model, frequencies: torch.Tensor) -> None:
    """Rotary frequencies fp32 [half the dimensions that turn], for all layers; latent attention has its own in each."""
    for module in model.modules():
        if isinstance(module, RotaryEmbedding):
            module.inv_freq = frequencies


def gather_latents(model) -> None:
    """Gather the latent of keys and values right behind its projection, where the layer spec cuts that over tp.

    Where Megatron would gather it, the gradient of the part that is rotated and shared by all heads lacks what the
    heads of other ranks add to it. Needs sequence parallelism.
    """
    for module in model.modules():
        down = getattr(module, "linear_kv_down_proj", None)
        if isinstance(down, ColumnParallelLinear) and model.config.tensor_model_parallel_size > 1:
            down.register_forward_hook(_gathered)


def _gathered(_module, _inputs, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    """Of a slice of the columns for all tokens, all columns for a slice of the tokens."""
    columns, bias = output
    return scatter_to_sequence_parallel_region(gather_from_tensor_model_parallel_region(columns)), bias


def mend_host_optimizer() -> None:
    """Make Megatron's optimizer on the host work without Transformer Engine, and with `load_state_dict`. Idempotent."""
    # 0.16 compares the version of Transformer Engine, None where it is not installed.
    if get_te_version() is None:
        optimizer_config.is_te_min_version = lambda *_args: False
    # It takes masters from the state that is loaded, also of fp32 parameters, of which it knows none. Whoever loads a
    # state fills `masters`.
    HybridDeviceOptimizer._update_fp32_params_by_new_state = lambda _self: None


def masters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What a torch optimizer of Megatron's steps, fp32: its parameters, or where it is on the host their copies there.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if isinstance(optimizer, HybridDeviceOptimizer):
        return [optimizer.param_to_inner_param[param] for param in params]
    return params


def chain(optimizer) -> list[MegatronOptimizer]:
    """Megatron's optimizers that hold parameters of this rank: it has one for experts and one for all else."""
    return [inner for inner in optimizer.chained_optimizers if inner.optimizer is not None]


def inner_optimizers(optimizer) -> list[torch.optim.Optimizer]:
    """The torch optimizers inside Megatron's."""
    return [inner.optimizer for inner in chain(optimizer)]
