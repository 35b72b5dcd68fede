"""GLM-4.5 to 4.7, with experts: DeepSeek-V3's routing, grouped attention with a partly rotated head."""
from __future__ import annotations

from mrl.reshard.families import dense, moe
from mrl.reshard.families.mtp import mtp
from mrl.reshard.rules import Family, MoeKeys

_ATTENTION = (dense.INPUT_NORM, dense.QKV, dense.QKV_BIAS, dense.Q_NORM, dense.K_NORM, dense.ATTENTION_OUT)
_LAYER = (
    *_ATTENTION, moe.MLP_NORM, moe.ROUTER, moe.ROUTER_BIAS, moe.GATE_UP, moe.DOWN,
    moe.SHARED_EXPERTS_GATE_UP, moe.SHARED_EXPERTS_DOWN,
)

GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    embedding=dense.EMBEDDING,
    layer=_LAYER,
    dense_layer=(*_ATTENTION, dense.MLP_NORM, dense.GATE_UP, dense.DOWN),
    mtp=mtp(_LAYER),
    final_norm=dense.FINAL_NORM,
    output=dense.OUTPUT,
    requires=(("norm_topk_prob", True),),
    defaults=(
        ("first_k_dense_replace", 1), ("norm_topk_prob", True), ("partial_rotary_factor", 0.5),
    ),
    qkv_bias="attention_bias",
    qk_norm="use_qk_norm",
    partial_rotary=True,
    moe=MoeKeys(
        ("n_routed_experts",), ffn="moe_intermediate_size", shared_count="n_shared_experts",
        dense_layers="first_k_dense_replace", scoring="sigmoid", bias=True,
        groups=("n_group", "topk_group"), group_best=2,
    ),
)
