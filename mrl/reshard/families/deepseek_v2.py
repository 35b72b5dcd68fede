"""DeepSeek-V2 and V2-Lite: latent attention, shared experts beside the routed ones, leading layers without experts."""
from __future__ import annotations

from mrl.reshard.families import dense, mla, moe
from mrl.reshard.rules import Family, MoeKeys

DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    embedding=dense.EMBEDDING,
    layer=(
        *mla.ATTENTION, moe.MLP_NORM, moe.ROUTER, moe.GATE_UP, moe.DOWN,
        moe.SHARED_EXPERTS_GATE_UP, moe.SHARED_EXPERTS_DOWN,
    ),
    dense_layer=(*mla.ATTENTION, dense.MLP_NORM, dense.GATE_UP, dense.DOWN),
    final_norm=dense.FINAL_NORM,
    output=dense.OUTPUT,
    requires=(
        ("attention_bias", False), ("mlp_bias", False), ("moe_layer_freq", 1), ("norm_topk_prob", False),
        ("scoring_func", "softmax"),
    ),
    defaults=(("first_k_dense_replace", 0), ("q_lora_rank", None), ("topk_method", "greedy")),
    mla=True,
    moe=MoeKeys(
        ("n_routed_experts",), ffn="moe_intermediate_size", shared_count="n_shared_experts",
        dense_layers="first_k_dense_replace", groups=("n_group", "topk_group"),
        group_method=("topk_method", "group_limited_greedy"),
    ),
)
