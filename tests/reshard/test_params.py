"""Which parameters every rank holds: Megatron's names, and every element of every tensor exactly once."""
from __future__ import annotations

import re
from collections import Counter

import pytest
import torch

from mrl.reshard import (
    Coord, Layout, duplicates, hf_tensors, is_expert, local_params, model_spec,
)

from .simulate import CASES, SIZES, VARIANTS, hf_config, spec_of

LAYER = "decoder.layers.0."


def names(variant: str, layout: Layout, pp: int, te: bool, layers: int = 4) -> list[str]:
    spec = model_spec({**hf_config(variant), "num_hidden_layers": layers})
    return [plan.name for plan in local_params(spec, layout, Coord(pp=pp), te)]


def test_names_under_the_local_layer_spec():
    assert names("qwen3", Layout(), 0, te=False, layers=1) == [
        "embedding.word_embeddings.weight",
        LAYER + "input_layernorm.weight",
        LAYER + "self_attention.linear_qkv.weight",
        LAYER + "self_attention.q_layernorm.weight",
        LAYER + "self_attention.k_layernorm.weight",
        LAYER + "self_attention.linear_proj.weight",
        LAYER + "pre_mlp_layernorm.weight",
        LAYER + "mlp.linear_fc1.weight",
        LAYER + "mlp.linear_fc2.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    ]


def test_names_under_the_transformer_engine_layer_spec():
    fused = {
        LAYER + "input_layernorm.weight": LAYER + "self_attention.linear_qkv.layer_norm_weight",
        LAYER + "pre_mlp_layernorm.weight": LAYER + "mlp.linear_fc1.layer_norm_weight",
    }
    local = names("qwen2", Layout(), 0, te=False, layers=1)
    assert LAYER + "self_attention.linear_qkv.bias" in local
    assert names("qwen2", Layout(), 0, te=True, layers=1) == [fused.get(name, name) for name in local]


def test_layers_are_numbered_per_stage_by_megatron_and_over_the_model_by_hugging_face():
    spec = model_spec(hf_config("llama"))
    plans = local_params(spec, Layout(pp=2), Coord(pp=1), te=False)
    down = {plan.name: plan.pieces[0].hf for plan in plans if "linear_fc2" in plan.name}
    assert down == {
        "decoder.layers.0.mlp.linear_fc2.weight": "model.layers.2.mlp.down_proj.weight",
        "decoder.layers.1.mlp.linear_fc2.weight": "model.layers.3.mlp.down_proj.weight",
    }


@pytest.mark.parametrize("variant", ["llama", "llama-mha-tied"])
@pytest.mark.parametrize("pp", [1, 2])
def test_embedding_and_output_by_stage(variant, pp):
    first, last = names(variant, Layout(pp=pp), 0, False), names(variant, Layout(pp=pp), pp - 1, False)
    assert "embedding.word_embeddings.weight" in first
    assert ("embedding.word_embeddings.weight" in last) == (pp == 1)
    # A tied model on one stage has no output weight at all; on two, the last stage holds a copy of the embedding.
    assert ("output_layer.weight" in last) == (variant == "llama" or pp == 2)
    assert ("output_layer.weight" in first) == (variant == "llama" and pp == 1)


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_every_layer_is_on_exactly_one_stage(pp):
    spec = model_spec(hf_config("llama"))
    seen = Counter(
        int(re.search(r"layers\.(\d+)\.", piece.hf).group(1))
        for stage in range(pp)
        for plan in local_params(spec, Layout(pp=pp), Coord(pp=stage), te=False)
        if plan.name.endswith("linear_proj.weight")
        for piece in plan.pieces
    )
    assert seen == dict.fromkeys(range(SIZES["num_hidden_layers"]), 1)


def test_names_of_chunks():
    spec, layout = model_spec(hf_config("llama-mha-tied")), Layout(pp=2, vpp=2)
    first, last = (local_params(spec, layout, Coord(pp=stage), te=False) for stage in range(2))
    ends = ("word_embeddings", "linear_proj", "final_layernorm", "output_layer")
    assert [(plan.name, plan.pieces[0].hf) for plan in first if any(end in plan.name for end in ends)] == [
        ("chunk0.embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        ("chunk0.decoder.layers.0.self_attention.linear_proj.weight", "model.layers.0.self_attn.o_proj.weight"),
        ("chunk1.decoder.layers.0.self_attention.linear_proj.weight", "model.layers.2.self_attn.o_proj.weight"),
    ]
    assert [(plan.name, plan.pieces[0].hf) for plan in last if any(end in plan.name for end in ends)] == [
        ("chunk0.decoder.layers.0.self_attention.linear_proj.weight", "model.layers.1.self_attn.o_proj.weight"),
        ("chunk1.decoder.layers.0.self_attention.linear_proj.weight", "model.layers.3.self_attn.o_proj.weight"),
        ("chunk1.decoder.final_layernorm.weight", "model.norm.weight"),
        ("chunk1.output_layer.weight", "model.embed_tokens.weight"),
    ]


@pytest.mark.parametrize("variant, layout", CASES, ids=str)
def test_pieces_cover_every_element_exactly_once(variant, layout):
    spec = spec_of(variant)
    left = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in hf_tensors(spec).items()}
    for rank in range(layout.world):
        for plan in local_params(spec, layout, layout.coord(rank), te=False):
            held = torch.zeros(plan.shape, dtype=torch.int32)
            for piece in plan.pieces:
                assert piece.hf_shape == tuple(left[piece.hf].shape)
                piece.of_local(held).add_(1)
                if piece.leaves:
                    piece.of_hf(left[piece.hf]).add_(1)
            assert held.max() <= 1, plan.name
            assert bool((held == 0).any()) == plan.padded
            assert not plan.padded or plan.name.endswith((".word_embeddings.weight", "output_layer.weight"))
    for name, counts in left.items():
        assert (counts == 1).all(), name


def test_a_tied_model_has_no_output_tensor():
    assert "lm_head.weight" not in hf_tensors(model_spec(hf_config("qwen3-tied")))
    assert "lm_head.weight" in hf_tensors(model_spec(hf_config("qwen3")))


def test_an_impossible_layout_lists_every_reason():
    with pytest.raises(ValueError) as error:
        local_params(model_spec(hf_config("llama")), Layout(tp=3, pp=3), Coord(), te=False)
    assert "pp 3 does not divide num_hidden_layers 4" in str(error.value)
    assert "tp 3 does not divide num_attention_heads 4" in str(error.value)
    assert "tp 3 is neither a divisor nor a multiple of num_key_value_heads 2" in str(error.value)
    assert "tp 3 does not divide intermediate_size 40" in str(error.value)


def test_the_fused_rows_must_divide_too():
    config = {**hf_config("llama"), "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 6}
    with pytest.raises(ValueError, match="tp 8 does not divide the 60 rows of q, k and v"):
        local_params(model_spec(config), Layout(tp=8), Coord(), te=False)


MOE = LAYER + "mlp."


def experts_of(variant: str, layout: Layout, coord: Coord, te: bool) -> dict[str, list[str]]:
    """Megatron name -> HF names of the first layer's MLP, without their common beginnings."""
    plans = local_params(spec_of(variant), layout, coord, te)
    return {
        plan.name.removeprefix(MOE): [piece.hf.removeprefix("model.layers.0.") for piece in plan.pieces]
        for plan in plans if plan.name.startswith(MOE)
    }


@pytest.mark.parametrize("te, names", [
    (False, ["experts.local_experts.{}.linear_fc1.weight", "experts.local_experts.{}.linear_fc2.weight"]),
    (True, ["experts.linear_fc1.weight{}", "experts.linear_fc2.weight{}"]),
], ids=["local", "te"])
def test_names_of_experts_are_local_and_their_tensors_global(te, names):
    layout = Layout(dp=4, ep=4)  # 8 experts: the third rank holds 4 and 5
    first, second = names
    assert experts_of("qwen2-moe", layout, Coord(dp=2), te) == {
        "router.weight": ["mlp.gate.weight"],
        first.format(0): ["mlp.experts.4.gate_proj.weight", "mlp.experts.4.up_proj.weight"],
        first.format(1): ["mlp.experts.5.gate_proj.weight", "mlp.experts.5.up_proj.weight"],
        second.format(0): ["mlp.experts.4.down_proj.weight"],
        second.format(1): ["mlp.experts.5.down_proj.weight"],
        "shared_experts.linear_fc1.weight": ["mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"],
        "shared_experts.linear_fc2.weight": ["mlp.shared_expert.down_proj.weight"],
        "shared_experts.gate_weight": ["mlp.shared_expert_gate.weight"],
    }


def test_mixtral_has_names_of_its_own():
    found = experts_of("mixtral", Layout(dp=8, ep=8), Coord(dp=7), te=True)
    assert found == {
        "router.weight": ["block_sparse_moe.gate.weight"],
        "experts.linear_fc1.weight0": ["block_sparse_moe.experts.7.w1.weight", "block_sparse_moe.experts.7.w3.weight"],
        "experts.linear_fc2.weight0": ["block_sparse_moe.experts.7.w2.weight"],
    }


@pytest.mark.parametrize("te", [False, True], ids=["local", "te"])
def test_the_norm_before_experts_is_fused_into_nothing(te):
    assert LAYER + "pre_mlp_layernorm.weight" in names("qwen3-moe", Layout(), 0, te)


def test_an_expert_is_cut_over_etp_and_the_shared_one_over_tp():
    layout = Layout(tp=2, dp=2, ep=1, etp=4)
    plans = {plan.name: plan for plan in local_params(
        model_spec(hf_config("qwen2-moe")), layout, layout.coord(2), te=False)}
    gate, up = plans[MOE + "experts.local_experts.0.linear_fc1.weight"].pieces
    assert gate.hf_index == up.hf_index == ((14, 21), (0, 24))  # 28 rows over 4 ranks: the third
    assert (gate.local_index[0], up.local_index[0]) == ((0, 7), (7, 14))
    assert plans[MOE + "experts.local_experts.0.linear_fc2.weight"].pieces[0].hf_index == ((0, 24), (14, 21))
    assert plans[MOE + "shared_experts.linear_fc1.weight"].pieces[0].hf_index == ((0, 18), (0, 24))


@pytest.mark.parametrize("variant, layout, message", [
    ("llama", Layout(dp=2, ep=2), "ep 2 divides experts, and the model has none"),
    ("llama", Layout(tp=2, etp=2), "etp 2 divides experts, and the model has none"),
    ("qwen3-moe", Layout(dp=3, ep=3), "ep 3 does not divide the number of experts 8"),
    ("qwen3-moe", Layout(dp=3, etp=3), "etp 3 does not divide moe_intermediate_size 28"),
    ("mixtral", Layout(dp=3, etp=3), "etp 3 does not divide intermediate_size 40"),
    ("qwen2-moe", Layout(tp=8), "tp 8 does not divide shared_expert_intermediate_size 36"),
])
def test_experts_that_do_not_divide(variant, layout, message):
    with pytest.raises(ValueError, match=message):
        local_params(spec_of(variant), layout, Coord(), te=False)


def test_experts_are_known_by_name():
    for variant in VARIANTS:
        for rule in spec_of(variant).family.layer:
            assert is_expert(rule.megatron(3, 5, te=False)) == is_expert(rule.megatron(3, 5, te=True)) == rule.expert


def layer_of(variant: str, layer: int, te: bool, layout: Layout = Layout(), coord: Coord = Coord()) -> dict:
    """Megatron name -> plan of one layer's parameters, without the common beginning."""
    plans = local_params(spec_of(variant), layout, coord, te)
    prefix = f"decoder.layers.{layer}."
    return {plan.name.removeprefix(prefix): plan for plan in plans if plan.name.startswith(prefix)}


def test_latent_attention_is_cut_unlike_in_transformer_engine():
    local, te = (layer_of("deepseek-v3", 0, te, Layout(tp=2), Coord(tp=1)) for te in (False, True))
    shapes = {name.removeprefix("self_attention."): plan.shape for name, plan in local.items() if "self_att" in name}
    assert shapes == {
        "linear_q_down_proj.weight": (6, 24), "linear_kv_down_proj.weight": (10, 24), "q_layernorm.weight": (12,),
        "linear_q_up_proj.weight": (32, 12), "kv_layernorm.weight": (14,), "linear_kv_up_proj.weight": (38, 14),
        "linear_proj.weight": (24, 18),
    }
    shapes = {name.removeprefix("self_attention."): plan.shape for name, plan in te.items() if "self_att" in name}
    assert shapes == {
        "linear_q_down_proj.weight": (12, 24), "linear_kv_down_proj.weight": (20, 24),
        "linear_q_up_proj.layer_norm_weight": (12,), "linear_q_up_proj.weight": (32, 12),
        "linear_kv_up_proj.layer_norm_weight": (14,), "linear_kv_up_proj.weight": (38, 14),
        "linear_proj.weight": (24, 18),
    }
    assert "input_layernorm.weight" in te
    assert not te["self_attention.linear_kv_down_proj.weight"].pieces[0].leaves  # the first rank sends it


def test_leading_layers_have_no_experts():
    dense, moe = (layer_of("deepseek-v3", layer, te=True) for layer in range(2))
    assert {name for name in dense if "mlp" in name} == {
        "mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"}
    assert {name for name in moe if "mlp" in name and "mlp.experts." not in name} == {
        "pre_mlp_layernorm.weight", "mlp.router.weight", "mlp.router.expert_bias",
        "mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc2.weight"}
    assert {name: plan.dtype for name, plan in moe.items() if plan.dtype} == {"mlp.router.expert_bias": "float32"}
    assert moe["mlp.shared_experts.linear_fc1.weight"].shape == (2 * 56, 24)


def test_a_query_without_a_latent():
    names = {name for name in layer_of("deepseek-v2", 0, te=True) if "_q_" in name or "q_layernorm" in name}
    assert names == {"self_attention.linear_q_proj.weight"}


def test_options_of_a_config_decide_about_parameters():
    plain = {**hf_config("glm4-moe"), "attention_bias": False, "use_qk_norm": False}
    names = {plan.name for plan in local_params(model_spec(plain), Layout(), Coord(), te=False)}
    gone = set(layer_of("glm4-moe", 0, te=False)) - {name.removeprefix(LAYER) for name in names}
    assert gone == {f"self_attention.{name}" for name in
                    ("linear_qkv.bias", "q_layernorm.weight", "k_layernorm.weight")}


def test_stacked_experts_come_from_one_tensor():
    layout = Layout(dp=4, ep=4, etp=1)
    found = layer_of("gpt-oss", 0, True, layout, Coord(dp=2))
    (piece,) = found["mlp.experts.linear_fc1.weight1"].pieces
    assert (piece.hf, piece.hf_shape) == ("model.layers.0.mlp.experts.gate_up_proj", (8, 24, 80))
    assert piece.hf_index == ((5, 6), (0, 24), (0, 80))
    assert found["mlp.experts.linear_fc1.weight1"].shape == (80, 24)
    assert found["mlp.experts.linear_fc2.bias0"].pieces[0].hf_index == ((4, 5), (0, 24))
    assert found["self_attention.core_attention.softmax_offset"].shape == (4,)


def test_prediction_layers_are_on_the_last_stage_and_share_the_embedding():
    spec, layout = spec_of("deepseek-v3-mtp"), Layout(pp=2)
    first, last = ([(plan.name, plan.pieces[0].hf) for plan in local_params(spec, layout, Coord(pp=stage), False)
                    if any("layers.4." in piece.hf for piece in plan.pieces)] for stage in range(2))
    assert first == [("embedding.word_embeddings.weight", "model.layers.4.embed_tokens.weight")]
    assert ("output_layer.weight", "model.layers.4.shared_head.head.weight") in last
    inside = "mtp.layers.0.transformer_layer.mlp.router.expert_bias"
    assert (inside, "model.layers.4.mlp.gate.e_score_correction_bias") in last
    assert duplicates(spec) == {
        "model.layers.4.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.4.shared_head.head.weight": "lm_head.weight",
    }
    carried = {plan.name for plan in local_params(spec, layout, Coord(pp=1), False) if plan.carried}
    assert carried == {name for name, _ in last} - {"output_layer.weight"}
