"""The sync plan: full buckets, every tensor once, the same everywhere, and fast at any size."""
from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from math import prod

import pytest

from mrl.reshard import Layout, SyncPlan, hf_tensors, model_spec, plan_sync
from mrl.reshard.params import hf_shapes

from .simulate import CASES, hf_config, spec_of

QWEN_2T = dict(
    architectures=["Qwen3MoeForCausalLM"], num_hidden_layers=64, hidden_size=7168, intermediate_size=18432,
    num_attention_heads=64, num_key_value_heads=8, head_dim=128, vocab_size=163840, rms_norm_eps=1e-6,
    num_experts=384, num_experts_per_tok=8, moe_intermediate_size=2048,
)
LLAMA_405B = dict(
    architectures=["LlamaForCausalLM"], num_hidden_layers=128, hidden_size=16384, intermediate_size=53248,
    num_attention_heads=128, num_key_value_heads=8, vocab_size=128256, rms_norm_eps=1e-5,
)


@pytest.mark.parametrize("te", [False, True], ids=["local", "te"])
@pytest.mark.parametrize("variant, layout", CASES, ids=str)
def test_every_tensor_leaves_exactly_once(variant, layout, te):
    spec = spec_of(variant)
    plan = plan_sync(spec, layout, 10_000, "float32", te)
    items = [item for bucket in plan.buckets for item in bucket.items]
    expected = hf_tensors(spec)
    assert len(items) == len(expected)
    assert {item.name: item.shape for item in items} == expected
    assert ("lm_head.weight" in expected) != spec.tied
    assert plan.total_bytes == 4 * sum(prod(shape) for shape in expected.values())


@pytest.mark.parametrize("bucket_bytes", [1, 5_000, 10_000, 10**9])
def test_buckets_are_flat_and_within_their_limit(bucket_bytes):
    plan = plan_sync(model_spec(hf_config("qwen2")), Layout(tp=2, pp=2), bucket_bytes, "float32", te=False)
    assert [bucket.index for bucket in plan.buckets] == list(range(len(plan.buckets)))
    assert [bucket.stage for bucket in plan.buckets] == sorted(bucket.stage for bucket in plan.buckets)
    for bucket in plan.buckets:
        assert bucket.nbytes <= bucket_bytes or len(bucket.params) == 1
        end = 0
        for item in bucket.items:
            assert (item.offset, item.numel, item.dtype) == (end, prod(item.shape), bucket.dtype)
            end += item.numel
        assert end == bucket.numel
    for bucket, following in zip(plan.buckets, plan.buckets[1:]):
        if bucket.stage == following.stage:  # no bucket ends early: the next parameter would not have fitted
            (column, *_) = zip(*following.shards)
            assert bucket.nbytes + 4 * sum(prod(shape) for shape in hf_shapes(column).values()) > bucket_bytes
    assert plan.max_bucket_numel == max(bucket.numel for bucket in plan.buckets)
    if bucket_bytes == 10**9:
        assert len(plan.buckets) == 2


def test_a_bucket_may_be_exactly_full():
    spec = model_spec(hf_config("llama"))
    whole = plan_sync(spec, Layout(), 10**9, "float32", te=False).total_bytes
    assert len(plan_sync(spec, Layout(), whole, "float32", te=False).buckets) == 1
    assert len(plan_sync(spec, Layout(), whole - 1, "float32", te=False).buckets) == 2


def test_tensors_of_one_parameter_stay_together():
    plan = plan_sync(model_spec(hf_config("qwen2")), Layout(), 1, "bfloat16", te=False)
    together = [[item.name.removeprefix("model.layers.0.") for item in bucket.items] for bucket in plan.buckets]
    assert ["self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"] in together
    assert ["mlp.gate_proj.weight", "mlp.up_proj.weight"] in together
    assert ["model.embed_tokens.weight"] in together


def test_padding_is_gathered_but_never_sent():
    plan = plan_sync(model_spec(hf_config("llama")), Layout(tp=4), 1, "float32", te=False)
    (bucket,) = [bucket for bucket in plan.buckets if bucket.params == ("output_layer.weight",)]
    assert bucket.numel == 131 * 24
    assert bucket.local_numel == 512 // 4 * 24
    assert plan.max_local_numel == bucket.local_numel


def test_experts_are_gathered_from_their_own_ranks():
    spec, layout = model_spec(hf_config("qwen2-moe")), Layout(tp=2, pp=2, dp=4, ep=4, etp=2)
    plan = plan_sync(spec, layout, 20_000, "float32", te=True)
    for bucket in plan.buckets:
        experts = {".experts." in name for name in bucket.params}
        assert experts == {len(bucket.shards) == 8}
        assert {tuple(param.name for param in shard) for shard in bucket.shards} == {bucket.params}
        assert {tuple(param.shape for param in shard) for shard in bucket.shards} == {
            tuple(param.shape for param in bucket.shards[0])}
    assert {len(bucket.shards) for bucket in plan.buckets} == {2, 8}
    (first, *_) = [bucket for bucket in plan.buckets if len(bucket.shards) == 8]
    gates = [item.name.removeprefix("model.layers.0.mlp.experts.") for item in first.items if "gate" in item.name]
    assert gates[:4] == ["0.gate_proj.weight", "2.gate_proj.weight", "4.gate_proj.weight", "6.gate_proj.weight"]


def test_experts_share_buckets_with_the_rest_where_all_come_from_the_same_ranks():
    plan = plan_sync(model_spec(hf_config("qwen3-moe")), Layout(tp=2, ep=2), 10**9, "float32", te=False)
    assert [len(bucket.shards) for bucket in plan.buckets] == [2]


def test_wire_round_trip():
    plan = plan_sync(model_spec(hf_config("qwen3")), Layout(tp=2, pp=2), 10_000, "bfloat16", te=True)
    wire = json.loads(json.dumps(plan.to_wire()))
    received = SyncPlan.from_wire(wire)
    assert received.to_wire() == wire == plan.to_wire()
    assert [bucket.items for bucket in received.buckets] == [bucket.items for bucket in plan.buckets]
    assert (received.total_bytes, received.max_bucket_numel) == (plan.total_bytes, plan.max_bucket_numel)


def test_a_plan_depends_on_its_arguments_alone():
    config, layout = hf_config("qwen2"), Layout(tp=2, pp=2)
    plan = plan_sync(model_spec(config), layout, 10_000, "float32", te=False)
    assert plan == plan_sync(model_spec(dict(reversed(config.items()))), layout, 10_000, "float32", te=False)
    code = (
        "from mrl.reshard import Layout, model_spec, plan_sync\n"
        f"print(repr(plan_sync(model_spec({config!r}), Layout(tp=2, pp=2), 10_000, 'float32', False).buckets))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": "77"}, capture_output=True, text=True,
        timeout=60, check=True,
    )
    assert other.stdout.strip() == repr(plan.buckets)


def test_ten_thousand_ranks_are_planned_in_seconds():
    layout = Layout(tp=8, pp=16, dp=80)
    assert layout.world == 10_240
    start = time.perf_counter()
    plan = plan_sync(model_spec(LLAMA_405B), layout, 512 << 20, "bfloat16", te=True)
    assert time.perf_counter() - start < 5.0  # 0.1 s on an idle core
    assert {bucket.stage for bucket in plan.buckets} == set(range(16))
    assert [layout.sender(stage) for stage in range(3)] == [0, 640, 1280]


def test_two_trillion_parameters_on_four_thousand_ranks():
    layout = Layout(tp=8, pp=16, dp=32, ep=64)
    start = time.process_time()
    plan = plan_sync(model_spec(QWEN_2T), layout, 512 << 20, "bfloat16", te=True)
    assert layout.world == 4096 and plan.total_bytes > 2e12
    assert time.process_time() - start < 10.0  # 1.3 s on an idle core


@pytest.mark.parametrize("arguments, message", [
    ((0, "float32"), "bucket_bytes is 0"), ((100, "int8"), "dtype 'int8' cannot be synced"),
])
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_sync(model_spec(hf_config("llama")), Layout(), *arguments, te=False)


@pytest.mark.parametrize("tp, padded", [(8, 152576), (4, 152064)])
def test_qwens_vocabulary_leaves_unpadded(tp, padded):
    config = {**hf_config("qwen2"), "vocab_size": 151936, "num_attention_heads": 8, "num_key_value_heads": 8,
              "hidden_size": 64, "intermediate_size": 128}
    layout = Layout(tp=tp)
    plan = plan_sync(model_spec(config), layout, 2**20, "bfloat16", te=False)
    item, = (item for bucket in plan.buckets for item in bucket.items if item.name == "model.embed_tokens.weight")
    assert item.shape == (151936, 64) and layout.padded_vocab(151936) == padded
