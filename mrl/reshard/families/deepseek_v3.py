"""DeepSeek-V3, R1 and V3.1: V2's layers, a router with a bias for balance, and a layer that predicts one token more."""
from __future__ import annotations

from mrl.reshard.families import dense, mla, moe
from mrl.reshard.families.mtp import mtp
from mrl.reshard.rules import Family, MoeKeys

_LAYER = (
    *mla.ATTENTION, moe.MLP_NORM, moe.ROUTER, moe.ROUTER_BIAS, moe.GATE_UP, moe.DOWN,
    moe.SHARED_EXPERTS_GATE_UP, moe.SHARED_EXPERTS_DOWN,
)

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    embedding=dense.EMBEDDING,
    layer=_LAYER,
    dense_layer=(*mla.ATTENTION, dense.MLP_NORM, dense.GATE_UP, dense.DOWN),
    mtp=mtp(_LAYER),
    final_norm=dense.FINAL_NORM,
    output=dense.OUTPUT,
    requires=(
        ("attention_bias", False), ("moe_layer_freq", 1), ("norm_topk_prob", True), ("scoring_func", "sigmoid"),
        ("topk_method", "noaux_tc"), ("rope_interleave", True),
    ),
    defaults=(
        ("first_k_dense_replace", 3), ("norm_topk_prob", True), ("q_lora_rank", 1536), ("routed_scaling_factor", 2.5),
        ("n_group", 8), ("topk_group", 4),
    ),
    mla=True,
    moe=MoeKeys(
        ("n_routed_experts",), ffn="moe_intermediate_size", shared_count="n_shared_experts",
        dense_layers="first_k_dense_replace", scoring="sigmoid", bias=True,
        groups=("n_group", "topk_group"), group_best=2,
    ),
)
