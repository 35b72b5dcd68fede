"""config.json to ModelSpec: both spellings transformers has had, and clear refusals."""
from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from mrl.reshard import MlaSpec, MoeSpec, family_of, model_spec, read_config

from .simulate import VARIANTS, hf_config, spec_of


def test_sizes_and_switches():
    spec = model_spec({**hf_config("qwen2-mqa-tied"), "rope_theta": 1e6})
    assert (spec.num_layers, spec.hidden, spec.ffn, spec.vocab) == (4, 24, 40, 131)
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.q_size, spec.kv_size) == (4, 1, 6, 24, 6)
    assert (spec.tied, spec.qkv_bias, spec.qk_norm) == (True, True, False)
    assert (spec.norm_eps, spec.rope_theta, spec.rope_scaling, spec.max_positions) == (1e-6, 1e6, None, 64)
    assert model_spec(hf_config("qwen3")).qk_norm
    assert model_spec(hf_config("qwen3")).moe is None


@pytest.mark.parametrize("variant, moe", [
    ("qwen3-moe", MoeSpec(num_experts=8, top_k=3, ffn=28, shared_ffn=None, norm_topk_prob=False)),
    ("qwen2-moe", MoeSpec(num_experts=8, top_k=3, ffn=28, shared_ffn=36, norm_topk_prob=False, shared_gate=True)),
    ("mixtral", MoeSpec(num_experts=8, top_k=3, ffn=40, shared_ffn=None, norm_topk_prob=True)),
    ("gpt-oss", MoeSpec(num_experts=8, top_k=3, ffn=40, shared_ffn=None, norm_topk_prob=False)),
    ("deepseek-v2", MoeSpec(
        num_experts=8, top_k=4, ffn=28, shared_ffn=56, norm_topk_prob=False, dense_layers=1)),
    ("deepseek-v3", MoeSpec(
        num_experts=8, top_k=4, ffn=28, shared_ffn=56, norm_topk_prob=True, dense_layers=1, scoring="sigmoid",
        bias=True, scaling=2.5, groups=4, top_groups=2, group_best=2)),
    ("glm4-moe", MoeSpec(
        num_experts=8, top_k=3, ffn=28, shared_ffn=28, norm_topk_prob=True, dense_layers=1, scoring="sigmoid",
        bias=True)),
])
def test_experts(variant, moe):
    assert spec_of(variant).moe == moe
    hash(spec_of(variant))


def test_a_family_that_cannot_be_trained_says_why():
    spec = model_spec(hf_config("mixtral"))
    spec.require_trainable()
    with pytest.raises(ValueError, match="MixtralForCausalLM cannot be trained: it is too large"):
        replace(spec, family=replace(spec.family, untrainable="it is too large")).require_trainable()


def test_routing_that_megatron_does_otherwise():
    config = {**hf_config("deepseek-v2"), "topk_method": "group_limited_greedy", "num_experts_per_tok": 3}
    assert model_spec({**config, "topk_group": 3}).untrainable is None
    with pytest.raises(ValueError, match="chosen by their 1 best, in megatron-core by 3"):
        model_spec({**config, "topk_group": 1}).require_trainable()
    assert model_spec(hf_config("deepseek-v3")).untrainable is None


def test_latent_attention():
    spec = model_spec(hf_config("deepseek-v3"))
    assert spec.mla == MlaSpec(q_rank=12, kv_rank=14, nope_dim=10, rope_dim=6, v_dim=9)
    assert (spec.mla.qk_dim, spec.mla.kv_up_dim, spec.mla.kv_down_dim, spec.mla.full_query) == (16, 19, 20, False)
    assert (spec.head_dim, spec.kv_heads) == (16, 4)
    assert model_spec(hf_config("deepseek-v2")).mla.full_query


def test_prediction_layers_are_an_option():
    assert model_spec(hf_config("deepseek-v3")).mtp_layers == 0
    assert model_spec(hf_config("deepseek-v3"), mtp="keep").mtp_layers == 1
    assert model_spec({**hf_config("glm4-moe"), "num_nextn_predict_layers": 2}, mtp="keep").mtp_layers == 2
    assert model_spec(hf_config("llama"), mtp="keep").mtp_layers == 0
    with pytest.raises(ValueError, match="tie_word_embeddings True is not supported with multi-token"):
        model_spec({**hf_config("deepseek-v3"), "tie_word_embeddings": True}, mtp="keep")


def test_what_a_model_that_cannot_be_trained_asks_for_is_not_judged():
    spec = model_spec(hf_config("gpt-oss"))
    assert spec.rope_scaling["factor"] == 32.0
    config = {**hf_config("gemma3"), "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}
    assert model_spec(config).rope_theta == 1e6
    assert model_spec(hf_config("glm4")).rotary_fraction == 0.5


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_transformers_writes_is_understood(variant, model_dir):
    assert spec_of(variant, read_config(model_dir(variant))) == spec_of(variant)


@pytest.mark.parametrize("rope", [
    {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", "factor": 8.0}},
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0}},
], ids=["oldest", "old", "new"])
def test_rope_in_every_spelling(rope):
    spec = model_spec({**hf_config("llama"), **rope})
    assert spec.rope_theta == 5e5
    assert spec.rope_scaling == {"rope_type": "llama3", "factor": 8.0}


def test_defaults_of_absent_keys():
    config = hf_config("llama")
    del config["num_key_value_heads"]
    spec = model_spec(config)
    assert (spec.kv_heads, spec.head_dim, spec.rope_theta, spec.tied) == (4, 6, 10000.0, False)
    config = hf_config("qwen3")
    del config["head_dim"]
    assert model_spec(config).head_dim == 128
    assert model_spec({**hf_config("qwen3-moe"), "norm_topk_prob": True}).moe.norm_topk_prob
    assert model_spec(hf_config("mixtral")).rope_theta == 1e6
    config = hf_config("mistral")
    del config["sliding_window"]
    with pytest.raises(ValueError, match="sliding_window 4096 is not supported, only None"):
        model_spec(config)


def test_a_config_without_architectures_goes_by_model_type():
    assert family_of({"model_type": "qwen3"}).architecture == "Qwen3ForCausalLM"


@pytest.mark.parametrize("config", [
    {"architectures": ["GPT2LMHeadModel"]}, {"model_type": "gpt2"},
    {"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"}, {},
])
def test_unknown_architecture_lists_the_known(config):
    with pytest.raises(ValueError, match="is not supported; known are LlamaForCausalLM, Qwen2ForCausalLM, Qwen3"):
        family_of(config)


@pytest.mark.parametrize("variant, change, message", [
    ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported, only 'silu'"),
    ("llama", {"attention_bias": True}, "attention_bias True"),
    ("llama", {"mlp_bias": True}, "mlp_bias True"),
    ("llama", {"attention_dropout": 0.1}, "attention_dropout 0.1"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not supported"),
    ("llama", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "longrope"}}, "rope_type 'longrope'"),
    ("llama", {"rope_scaling": {"rope_type": "yarn"}}, "rope_type 'yarn' has no factor"),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "scales attention by 1.139"),  # 0.1 ln 4 + 1
    ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config: weights in fp8 are not"),
    ("gpt-oss", {"quantization_config": {"quant_method": "mxfp4"}}, "in mxfp4 are not supported, only bfloat16"),
    ("gpt-oss", {"layer_types": ["chunked_attention"]}, "layer_types ['chunked_attention'] are not supported"),
    ("gemma3", {"hidden_activation": "silu"}, "hidden_activation 'silu' is not supported, only 'gelu_pytorch_tanh'"),
    ("deepseek-v3", {"num_key_value_heads": 2}, "num_key_value_heads 2 must be num_attention_heads 4"),
    ("deepseek-v3", {"topk_group": 5}, "n_group 4 and topk_group 5 do not fit 8 experts"),
    ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
    ("deepseek-v3", {"kv_lora_rank": None}, "kv_lora_rank None must be a positive integer"),
    ("qwen2", {"use_sliding_window": True}, "use_sliding_window True"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ("qwen3", {"attention_bias": True}, "attention_bias True"),
    ("mistral", {"sliding_window": 32}, "sliding_window 32"),
    ("qwen2-moe", {"qkv_bias": False}, "qkv_bias False is not supported, only True"),
    ("qwen2-moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size 0 must be a positive"),
    ("qwen3-moe", {"mlp_only_layers": [1]}, "mlp_only_layers [1]"),
    ("qwen3-moe", {"decoder_sparse_step": 2}, "decoder_sparse_step 2"),
    ("qwen3-moe", {"num_experts": 2}, "num_experts_per_tok 3 is more than the number of experts 2"),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise 0.1"),
    ("llama", {"vocab_size": None}, "vocab_size None must be a positive integer"),
    ("llama", {"num_hidden_layers": "4"}, "num_hidden_layers '4' must be a positive integer"),
    ("llama", {"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
    ("llama", {"hidden_size": 25}, "hidden_size 25 is not a multiple of num_attention_heads 4"),
])
def test_unsupported_values_are_named(variant, change, message):
    with pytest.raises(ValueError) as error:
        model_spec({**hf_config(variant), **change})
    assert message in str(error.value)


def test_all_problems_are_listed_at_once():
    with pytest.raises(ValueError) as error:
        model_spec({"architectures": ["Qwen2ForCausalLM"], "hidden_act": "relu", "hidden_size": 8})
    for key in ("hidden_act", "num_hidden_layers", "intermediate_size", "num_attention_heads", "vocab_size",
                "num_key_value_heads", "rms_norm_eps"):
        assert key in str(error.value)


def test_config_file_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json not found"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        read_config(tmp_path)


def test_planning_imports_no_torch():
    code = (
        "import sys; from mrl.reshard import EngineLayout, Layout, SyncOptions, model_spec, plan_sync\n"
        f"plan = plan_sync(model_spec({hf_config('llama')!r}), Layout(tp=2), EngineLayout(tp=2),\n"
        "                 SyncOptions(1000, 'bfloat16', True))\n"
        "plan.bucket(0), plan.to_wire(0)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


def test_the_package_offers_what_needs_torch_too():
    import mrl.reshard
    from mrl.reshard.load import load_hf

    assert mrl.reshard.load_hf is load_hf
    assert all(hasattr(mrl.reshard, name) for name in mrl.reshard.__all__)
    with pytest.raises(AttributeError, match="no attribute 'load_everything'"):
        mrl.reshard.load_everything
