"""Plans of a sync in blockwise fp8: what is quantised, where it is cut, and what it costs."""
from __future__ import annotations

import json
from math import prod

import pytest

from mrl.reshard import DTYPE_BYTES, EngineLayout, Layout, SyncOptions, SyncPlan, hf_tensors, model_spec, plan_sync
from mrl.reshard.boxes import cut, numel, pieces_of
from mrl.reshard.fp8 import (
    blocks, of_whole_blocks, places, quantization_config, quantised_name, scales_name, scales_shape,
)
from mrl.reshard.pinned import Pins
from tests.reshard.simulate import spec_of

STRATEGIES = ("broadcast", "multi_sender", "sharded")
MOE = model_spec(dict(
    architectures=["Qwen3MoeForCausalLM"], num_hidden_layers=2, hidden_size=320, intermediate_size=640,
    num_attention_heads=8, num_key_value_heads=4, head_dim=128, vocab_size=131, rms_norm_eps=1e-6,
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=512))
ENGINES = EngineLayout(count=2, tp=2)
LIMIT = 8 * 2 * 128 * 128


def planned(strategy: str, layout: Layout, engines: EngineLayout = ENGINES, spec=MOE, pinned: Pins | None = None,
            **more) -> SyncPlan:
    return plan_sync(spec, layout, engines, SyncOptions(LIMIT, "bfloat16", False, strategy, smallest_bytes=1,
                                                        fp8=True, pinned=pinned, **more))


def projection(name: str) -> bool:
    return name.endswith("_proj.weight")


def test_boxes_are_cut_at_multiples_of_a_grain():
    box = ((0, 300), (0, 200))
    assert pieces_of(box, 128 * 200, 128) == [((0, 128), (0, 200)), ((128, 256), (0, 200)), ((256, 300), (0, 200))]
    assert pieces_of(box, 128 * 128, 128)[:2] == [((0, 128), (0, 128)), ((0, 128), (128, 200))]
    assert sum(map(numel, pieces_of(box, 1, 128))) == 300 * 200, "a block is never cut"
    assert cut(box, 255 * 200, 128) == (((0, 128), (0, 200)), ((128, 300), (0, 200)))
    assert cut(box, 127 * 200, 128) == (None, box)
    assert cut(((256, 300), (128, 200)), 44 * 72, 128) == (((256, 300), (128, 200)), None)


def test_scales_lie_behind_the_values_of_a_slice():
    at = places([((0, 128), (0, 130)), ((128, 131), (128, 129))])
    assert at.values == [0, 128 * 130]
    assert at.scales == [128 * 130 + 4, 128 * 130 + 12] and at.nbytes == at.scales[1] + 4
    assert blocks(((128, 131), (0, 257))) == ((1, 2), (0, 3)) and scales_shape((131, 257)) == (2, 3)
    assert of_whole_blocks(((128, 131), (0, 256)), (131, 512)) and not of_whole_blocks(((0, 64), (0, 512)), (128, 512))


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, pp=2), Layout(tp=4, dp=2, ep=4, etp=2)], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_block_and_every_scale_arrives_once_and_is_counted(strategy, layout):
    plan = planned(strategy, layout)
    shapes = hf_tensors(MOE)
    expected = {name: ("float8_e4m3fn" if projection(name) else "bfloat16", shape) for name, shape in shapes.items()}
    expected |= {scales_name(name): ("float32", scales_shape(shape)) for name, shape in shapes.items()
                 if projection(name)}
    assert plan.total_bytes == sum(
        {"float8_e4m3fn": 1, "bfloat16": 2, "float32": 4}[dtype] * prod(shape) for dtype, shape in expected.values())
    for engine in range(2):
        wire = json.loads(json.dumps(plan.to_wire(engine)))
        names, found, elements = list(wire["tensors"]), {}, {}
        assert {name: tuple(shape) for name, shape in wire["tensors"].items()} == {
            name: shape for name, (_, shape) in expected.items()}
        for entry in wire["buckets"]:
            copies = ENGINES.world if entry["worker"] is None else 1
            for one in entry["slices"]:
                end = 0
                for place, box, offset, *dtype in wire["contents"][one["contents"]]:
                    name = names[wire["groups"][one["group"]][place]]
                    found[name] = (dtype or [entry["dtype"]])[0]
                    sides = box or [[0, size] for size in wire["tensors"][name]]
                    size = prod(stop - start for start, stop in sides)
                    elements[name] = elements.get(name, 0) + copies * size
                    width = {"float8_e4m3fn": 1, "float32": 4}[found[name]] if dtype else 1
                    assert end <= offset < end + 4 and offset % width == 0 and entry["slice_numel"] % width == 0
                    end = offset + width * size
                    if found[name] == "float8_e4m3fn":
                        assert of_whole_blocks(sides, wire["tensors"][name])
                assert end == one["numel"] <= entry["slice_numel"]
        assert found == {name: dtype for name, (dtype, _) in expected.items()}
        for name, count in elements.items():  # one worker's share, or both workers'
            whole = prod(expected[name][1])
            assert count in ((whole, 2 * whole) if strategy == "sharded" else (2 * whole,)), name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_half_the_bytes_are_sent_and_all_of_them_gathered(strategy):
    layout = Layout(tp=2, dp=2, ep=2, etp=2)
    plan = planned(strategy, layout)
    plain = plan_sync(MOE, layout, ENGINES, SyncOptions(LIMIT, "bfloat16", False, strategy, smallest_bytes=1))
    assert 0.5 < plan.total_bytes / plain.total_bytes < 0.6
    assert 0.5 < sum(plan.bytes_by_sender.values()) / sum(plain.bytes_by_sender.values()) < 0.65
    for brief, bucket in zip(plan.outline, map(plan.bucket, range(len(plan.outline)))):
        assert (brief.dtype, bucket.fp8) == (bucket.dtype, bucket.dtype == "uint8") and bucket.held == "bfloat16"
        for one, short in zip(bucket.slices, brief.slices):
            assert (short.nbytes, short.gathered) == (one.sent * DTYPE_BYTES[bucket.dtype], 2 * one.numel)
            assert short.gathered <= LIMIT and (not bucket.fp8 or 4 * short.nbytes < 2.01 * short.gathered + 12)
        assert bucket.nbytes <= plan.max_bucket_bytes <= LIMIT
    assert sum(one.gathered for brief in plan.outline for one in brief.slices if len(one.ranks) > 1) // 2 == (
        plan.schedule.totals.gathered.sum())


def test_shards_that_cut_through_blocks_go_whole():
    """Experts of 512 rows, over 8 trainer ranks or 8 workers: 64 rows each."""
    def direct(layout: Layout, engines: EngineLayout) -> set[str]:
        plan = planned("sharded", layout, engines)
        return {part.name.rpartition(".")[0].rpartition(".")[2] for bucket in plan.of_engine(0)
                if bucket.mode == "direct" for one in bucket.slices for part in one.parts}

    assert direct(Layout(tp=4), EngineLayout(tp=2)) == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    for layout, engines in ((Layout(tp=4), EngineLayout(tp=8)), (Layout(tp=8, etp=8), EngineLayout(tp=4))):
        assert direct(layout, engines) == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_tensors_that_are_not_to_be_shards_are_named_by_themselves_or_by_their_scales():
    name = "model.layers.0.self_attn.o_proj.weight"
    for excluded in (name, scales_name(name)):
        plan = planned("sharded", Layout(tp=2), not_sharded=frozenset([excluded]))
        modes = {bucket.mode for bucket in plan.of_engine(0) for one in bucket.slices for part in one.parts
                 if part.name == name}
        assert modes == {"slices"} and quantised_name(excluded) == name


def test_senders_that_are_pinned_send_fp8_too():
    plan = planned("multi_sender", Layout(tp=2, pp=2), EngineLayout(count=2, tp=2), pinned=((0, 1), (2, 3)))
    assert plan.bytes_by_sender.keys() == {0, 1, 2, 3}
    assert sum(plan.bytes_by_sender.values()) == 2 * sum(
        one.nbytes for engine in range(1) for brief in plan.outline if engine in brief.engines for one in brief.slices)
    assert 0.9 < sum(plan.bytes_by_worker) / plan.total_bytes < 1.1


def test_what_is_quantised_is_what_is_published():
    """DeepSeek-V3, Qwen3 and Qwen2-MoE: routers, gates of shared experts and the output stay as they are."""
    for variant, plain in [
        ("deepseek-v3", {"lm_head", "model.embed_tokens", "model.layers.1.mlp.gate"}),
        ("qwen3", {"lm_head", "model.embed_tokens"}),
        ("qwen2-moe", {"lm_head", "model.embed_tokens", *(
            f"model.layers.{layer}.mlp.{gate}" for layer in range(2) for gate in ("gate", "shared_expert_gate"))}),
    ]:
        config = quantization_config(spec_of(variant))
        assert set(config.pop("modules_to_not_convert")) == plain
        assert config == {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                          "weight_block_size": [128, 128]}
        plan = planned("broadcast", Layout(), EngineLayout(), spec_of(variant))
        scaled = {quantised_name(name) for name in plan.to_wire(0)["tensors"] if name != quantised_name(name)}
        assert scaled == {name for name in hf_tensors(spec_of(variant)) if "_proj" in name and name.endswith("weight")}


def test_a_model_or_a_bucket_that_cannot_be_quantised_is_refused():
    with pytest.raises(ValueError, match="fp8 needs matrices, and model.layers.0.mlp.experts.*gpt_oss stacks experts"):
        planned("broadcast", Layout(), spec=spec_of("gpt-oss"))
    with pytest.raises(ValueError, match="bucket_bytes is 60000, but for fp8 each of 2 slices needs room for 128 x"):
        plan_sync(MOE, Layout(), ENGINES, SyncOptions(60_000, "bfloat16", False, "multi_sender", fp8=True))
