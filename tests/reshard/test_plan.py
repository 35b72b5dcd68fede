"""The sync plan: every element once to every worker, balanced, in an order for all, the same everywhere, fast."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from math import prod

import pytest

from mrl.reshard import (
    EngineLayout, Layout, Network, SyncOptions, SyncPlan, gather_groups, held_boxes, hf_tensors, model_spec, plan_sync,
)
from mrl.reshard.boxes import intersection

from .simulate import CASES, ENGINES, hf_config, spec_of

STRATEGIES = ("broadcast", "multi_sender", "sharded")
MOE_1T = dict(
    architectures=["Qwen3MoeForCausalLM"], num_hidden_layers=61, hidden_size=7168, intermediate_size=18432,
    num_attention_heads=64, num_key_value_heads=8, head_dim=128, vocab_size=163840, rms_norm_eps=1e-6,
    num_experts=384, num_experts_per_tok=8, moe_intermediate_size=2048,
)
DEEPSEEK_V3 = dict(
    architectures=["DeepseekV3ForCausalLM"], num_hidden_layers=61, hidden_size=7168, intermediate_size=18432,
    num_attention_heads=128, num_key_value_heads=128, vocab_size=129280, rms_norm_eps=1e-6, n_routed_experts=256,
    n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=2048, first_k_dense_replace=3, q_lora_rank=1536,
    kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_group=8, topk_group=4,
)
BIG_LAYOUT = Layout(tp=8, pp=8, dp=64, ep=64, first_stage_layers=7, last_stage_layers=6)


def options(strategy: str, bucket_bytes: int = 8_000, **more) -> SyncOptions:
    return SyncOptions(bucket_bytes, "float32", False, strategy, **{"smallest_bytes": 400, **more})


def boxes_to(plan: SyncPlan, engine: int, worker: int) -> dict[str, list]:
    """Boxes that a worker gets, by HF tensor."""
    found: dict[str, list] = {}
    for bucket in plan.of_engine(engine, worker):
        for one in bucket.slices:
            for part in one.parts:
                found.setdefault(part.name, []).append(part.box)
    return found


def numel(boxes) -> int:
    return sum(prod(stop - start for start, stop in box) for box in boxes)


@pytest.mark.parametrize("variant, layout", CASES, ids=str)
def test_every_element_arrives_exactly_once(variant, layout):
    """Every case with one strategy and one engine layout; every combination of those with many cases."""
    turn = CASES.index((variant, layout))
    strategy, engines = STRATEGIES[turn % 3], ENGINES[turn // 3 % len(ENGINES)]
    spec = spec_of(variant)
    plan = plan_sync(spec, layout, engines, options(strategy))
    held = {tensor.name: (entry, number, tensor.shape) for group in gather_groups(spec, layout)
            for at, entry in enumerate(group.entries) for number, tensor in enumerate(group.tensors(at))}
    expected = hf_tensors(spec)
    assert held.keys() == expected.keys() and {name: shape for name, (*_, shape) in held.items()} == expected
    assert plan.total_bytes == 4 * sum(map(prod, expected.values()))
    received = 0
    for worker in {0, engines.world - 1}:
        came = boxes_to(plan, engines.count - 1, worker)
        for name, (entry, number, shape) in held.items():
            boxes = came.get(name, [])
            assert not any(intersection(a, b) for i, a in enumerate(boxes) for b in boxes[:i]), name
            wanted = held_boxes(entry.rule, number, shape, entry.expert, spec, engines, worker) or ()
            assert numel(boxes) in (prod(shape), numel(wanted)), name
            if numel(boxes) != prod(shape):
                assert strategy == "sharded" and all(any(intersection(a, b) == a for b in wanted) for a in boxes), name
            received += numel(boxes)
    assert strategy == "sharded" or received == plan.total_bytes // 4 * len({0, engines.world - 1})


def small(strategy: str, layout: Layout, engines: EngineLayout, **more) -> SyncPlan:
    return plan_sync(spec_of("qwen2"), layout, engines, options(strategy, **more))


def test_a_broadcast_comes_from_the_first_rank_of_each_stage():
    plan = small("broadcast", Layout(tp=2, pp=2, dp=3), EngineLayout(count=2, tp=2))
    assert {(one.sender, one.ranks) for brief in plan.outline for one in brief.slices} == {(0, (0, 1)), (6, (6, 7))}
    assert {(brief.mode, brief.engines, brief.worker) for brief in plan.outline} == {("broadcast", (0, 1), None)}
    assert plan.senders(1) == (0, 6)
    # Both stages send their buckets in turn. The model's 131*24 embedding and output are of one stage each.
    assert [brief.stage for brief in plan.outline][:4] == [0, 1, 0, 1]
    assert sum(plan.bytes_by_sender.values()) == 2 * plan.total_bytes
    assert plan.bytes_by_worker == (plan.total_bytes, plan.total_bytes)


def test_experts_are_sent_from_their_own_ranks():
    plan = plan_sync(spec_of("qwen3-moe"), Layout(tp=2, dp=4, ep=4, etp=2), EngineLayout(), options("broadcast"))
    senders = {}
    for bucket in (plan.bucket(index) for index in range(len(plan.outline))):
        (one,) = bucket.slices
        for part in one.parts:
            expert = part.name.partition(".experts.")[2].partition(".")[0]
            senders.setdefault((one.sender, one.ranks), set()).add(expert)
    assert senders == {(0, (0, 1)): {"", "0", "1"}, (2, (2, 3)): {"2", "3"}, (4, (4, 5)): {"4", "5"},
                       (6, (6, 7)): {"6", "7"}}


def test_slices_of_a_bucket_come_from_different_ranks():
    """Two tp ranks and two of four replicas fill the four slices; engine 0 is served by replicas 0, 1, engine 1 by the
    others."""
    plan = small("multi_sender", Layout(tp=2, dp=4), EngineLayout(count=2, tp=8, gpus_per_node=4))
    for brief in plan.outline:
        assert len(brief.slices) == 4 and brief.engines == (brief.index % 2,)
        assert [one.sender for one in brief.slices] == [4 * (brief.index % 2) + rank for rank in range(4)]
    assert plan.senders(0) == (0, 1, 2, 3) and plan.senders(1) == (4, 5, 6, 7)
    assert sum(plan.bytes_by_sender.values()) == 2 * 2 * plan.total_bytes  # to one worker of each of two nodes
    assert sum(plan.bytes_by_worker) == 2 * plan.total_bytes
    assert max(plan.bytes_by_worker) <= 1.1 * min(plan.bytes_by_worker)


def test_a_shard_goes_from_its_rank_to_its_worker():
    """Trainer rank 1 has the second half of every projection; of the engine's four workers, 2 and 3 have those."""
    plan = small("sharded", Layout(tp=2), EngineLayout(tp=4), bucket_bytes=10**6, smallest_bytes=10**6)
    direct = {(bucket.slices[0].sender, bucket.worker): bucket
              for bucket in plan.of_engine(0) if bucket.mode == "direct"}
    # qwen2 here: 4 query heads of 6 rows, 2 KV heads, so that workers 2 and 3 share head 1; MLP 40.
    assert direct.keys() == {(0, 0), (0, 1), (1, 2), (1, 3)}
    parts = {part.name.removeprefix("model.layers.3."): part.box for part in direct[1, 2].slices[0].parts
             if part.name.startswith("model.layers.3.")}
    assert parts == {
        "self_attn.q_proj.weight": ((12, 18), (0, 24)), "self_attn.k_proj.weight": ((6, 12), (0, 24)),
        "self_attn.v_proj.weight": ((6, 12), (0, 24)), "self_attn.q_proj.bias": ((12, 18),),
        "self_attn.k_proj.bias": ((6, 12),), "self_attn.v_proj.bias": ((6, 12),),
        "self_attn.o_proj.weight": ((0, 24), (12, 18)), "mlp.gate_proj.weight": ((20, 30), (0, 24)),
        "mlp.up_proj.weight": ((20, 30), (0, 24)), "mlp.down_proj.weight": ((0, 24), (20, 30)),
    }
    rest = {part.name for bucket in plan.of_engine(0) if bucket.mode == "slices"
            for one in bucket.slices for part in one.parts}
    whole = ("norm", "embed", "head")
    assert rest == {name for name in hf_tensors(spec_of("qwen2")) if any(word in name for word in whole)}
    assert plan.bytes_by_worker[2] < plan.total_bytes / 2


@pytest.mark.parametrize("bucket_bytes", [32, 5_000, 10_000, 10**9])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_buckets_are_flat_and_within_their_limit(strategy, bucket_bytes):
    plan = small(strategy, Layout(tp=2, pp=2), EngineLayout(tp=2), bucket_bytes=bucket_bytes)
    buckets = [plan.bucket(index) for index in range(len(plan.outline))]
    assert max(bucket.nbytes for bucket in buckets) == plan.max_bucket_bytes <= bucket_bytes
    for bucket in buckets:
        for one in bucket.slices:
            end = 0
            for part in one.parts:
                assert part.offset == end
                end += part.numel
            assert end == one.numel == sum(given.numel for shard in one.shards for given in shard)
            assert one.sender in one.ranks and (not one.numel or len(one.shards) == len(one.ranks))
    if bucket_bytes == 10**9:
        assert len(buckets) <= {"broadcast": 2, "multi_sender": 2, "sharded": 6}[strategy]


def test_whole_tensors_are_kept_together_in_broadcasts():
    plan = small("broadcast", Layout(), EngineLayout(), bucket_bytes=10_000)
    cut = {part.name for bucket in plan.of_engine(0) for one in bucket.slices for part in one.parts if not part.whole}
    assert cut == {"model.embed_tokens.weight", "lm_head.weight"}  # 131 * 24 * 4 bytes
    rows = [part.box[0] for bucket in plan.of_engine(0) for one in bucket.slices for part in one.parts
            if part.name == "lm_head.weight"]
    assert rows == [(0, 65), (65, 131)]


@pytest.mark.parametrize("replicas, engines", [(1, 1), (1, 4), (4, 1), (2, 3), (3, 2), (5, 4), (8, 8), (8, 3)])
@pytest.mark.parametrize("strategy", ["multi_sender", "sharded"])
def test_senders_carry_equal_shares(strategy, replicas, engines):
    """Of all ranks: tp 4, and as many replicas of experts as of the rest."""
    layout = Layout(tp=4, dp=4 * replicas, ep=4, etp=4)
    spec = model_spec({**hf_config("qwen3-moe"), "num_hidden_layers": 12, "num_attention_heads": 8,
                       "num_key_value_heads": 8, "moe_intermediate_size": 112})
    plan = plan_sync(spec, layout, EngineLayout(count=engines, tp=4), options(strategy, 10_000, smallest_bytes=1))
    sent = [plan.bytes_by_sender.get(rank, 0) for rank in range(layout.world)]
    assert max(sent) <= 1.35 * sum(sent) / len(sent), sent


@pytest.mark.parametrize("strategy", ["multi_sender", "sharded"])
def test_neighbouring_buckets_have_other_senders_and_workers(strategy):
    engines = EngineLayout(count=2, tp=4, gpus_per_node=2)
    plan = plan_sync(spec_of("qwen3-moe"), Layout(tp=2, dp=8, ep=4), engines, options(strategy, bucket_bytes=4_000))
    busy = [({one.sender for one in brief.slices if one.nbytes}, {(brief.engines, brief.worker)})
            for brief in plan.outline]
    apart = [not a[0] & b[0] and not a[1] & b[1] for a, b in zip(busy, busy[1:])]
    assert sum(apart) > 0.8 * len(apart)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_brief_and_whole_buckets_agree(strategy):
    """Every rank and every worker sees the same buckets, its own share of them, in the same order."""
    layout, engines = Layout(tp=2, pp=2, dp=2, ep=2), EngineLayout(count=2, tp=4, gpus_per_node=2)
    plan = plan_sync(spec_of("qwen3-moe"), layout, engines, options(strategy))
    takes_part: dict[int, list[int]] = {rank: [] for rank in range(layout.world)}
    senders: dict[int, set[int]] = {0: set(), 1: set()}
    for brief, bucket in zip(plan.outline, map(plan.bucket, range(len(plan.outline)))):
        assert (bucket.index, bucket.mode, bucket.engines, bucket.worker) == (
            brief.index, brief.mode, brief.engines, brief.worker)
        for one, short in zip(bucket.slices, brief.slices, strict=True):
            assert (one.numel * 4, one.ranks, one.sender) == (short.nbytes, short.ranks, short.sender)
            for engine in brief.engines:
                senders[engine] |= {one.sender} if one.numel else set()
        for rank in {rank for one in bucket.slices if one.numel for rank in one.ranks}:
            takes_part[rank].append(bucket.index)
    assert {engine: set(plan.senders(engine)) for engine in senders} == senders
    for rank, indices in takes_part.items():
        mine = list(plan.of_rank(rank))
        assert [bucket.index for bucket in mine] == indices == [brief.index for brief in plan.outline_of_rank(rank)]
        for bucket in mine:
            for one, whole in zip(bucket.slices, plan.bucket(bucket.index).slices, strict=True):
                assert one == whole if rank in one.ranks and one.numel else not one.parts and not one.shards
    for engine in range(2):
        for worker in range(4):
            indices = [bucket.index for bucket in plan.of_engine(engine, worker)]
            assert indices == [brief.index for brief in plan.outline
                               if engine in brief.engines and brief.worker in (None, worker)]


def test_the_wire_form_names_senders_by_their_position():
    engines = EngineLayout(count=2, tp=2)
    plan = small("sharded", Layout(tp=2, dp=2), engines)
    for engine in range(2):
        wire, senders = json.loads(json.dumps(plan.to_wire(engine))), plan.senders(engine)
        assert (wire["workers"], wire["node"], wire["senders"]) == (2, 2, len(senders))
        assert {name: tuple(shape) for name, shape in wire["tensors"].items()} == hf_tensors(spec_of("qwen2"))
        names = list(wire["tensors"])
        for entry, bucket in zip(wire["buckets"], plan.of_engine(engine), strict=True):
            assert (entry["index"], entry["dtype"], entry["mode"], entry["worker"], entry["slice_numel"]) == (
                bucket.index, bucket.dtype, bucket.mode, bucket.worker, bucket.slice_numel)
            for written, one in zip(entry["slices"], bucket.slices, strict=True):
                group = [names[number] for number in wire["groups"][written["group"]]]
                assert written["numel"] == one.numel
                assert not one.numel or senders[written["sender"]] == one.sender
                assert [[group[place], *rest] for place, *rest in wire["contents"][written["contents"]]] == [
                    [part.name, None if part.whole else [list(span) for span in part.box], part.offset]
                    for part in one.parts]


def test_buffers_travel_in_buckets_of_their_own_dtype():
    plan = plan_sync(spec_of("deepseek-v3"), Layout(tp=2), EngineLayout(),
                     SyncOptions(10_000, "bfloat16", False, "multi_sender"))
    dtypes = Counter(bucket.dtype for bucket in plan.of_engine(0) for one in bucket.slices for part in one.parts
                     if part.name.endswith("e_score_correction_bias"))
    assert dtypes == {"float32": 1} and {bucket.dtype for bucket in plan.of_engine(0)} == {"float32", "bfloat16"}
    elements = sum(map(prod, hf_tensors(spec_of("deepseek-v3")).values()))
    assert plan.total_bytes == 2 * elements + 2 * 8 == sum(plan.bytes_by_worker)


def test_auto_takes_the_least_predicted_time():
    spec = model_spec({**MOE_1T, "num_hidden_layers": 4})
    auto = SyncOptions(512 << 20, "bfloat16", True)
    alone = plan_sync(spec, Layout(), EngineLayout(), auto)
    assert alone.strategy == "broadcast" and alone.predictions.keys() == set(STRATEGIES)
    many = plan_sync(spec, Layout(tp=8, dp=4, ep=32), EngineLayout(count=2, tp=16, ep=16), auto)
    assert many.strategy == "sharded" and many.predicted_s == min(many.predictions.values())
    assert many.predictions["multi_sender"] < many.predictions["broadcast"]


def test_a_plan_depends_on_its_arguments_alone():
    config = hf_config("qwen3-moe")
    code = (
        "from mrl.reshard import EngineLayout, Layout, SyncOptions, model_spec, plan_sync\n"
        f"plan = plan_sync(model_spec({config!r}), Layout(tp=2, dp=2, ep=2), EngineLayout(count=3, tp=2),\n"
        "    SyncOptions(10_000, 'float32', False, 'sharded', frozenset({'model.norm.weight', 'lm_head.weight'})))\n"
        "print([plan.bucket(index) for index in range(len(plan.outline))])\n"
    )
    runs = [subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, check=True,
                           capture_output=True, text=True, timeout=300).stdout for seed in ("1", "77")]
    assert runs[0] == runs[1] and len(runs[0]) > 10_000


SCALE = """
import json, sys, time
from mrl.reshard import EngineLayout, Layout, SyncOptions, model_spec, plan_sync
config, strategy, engines = json.loads(sys.argv[1])
start = time.process_time()
plan = plan_sync(model_spec(config), Layout(tp=8, pp=8, dp=64, ep=64, first_stage_layers=7, last_stage_layers=6),
                 EngineLayout(**engines), SyncOptions(512 << 20, "bfloat16", True, strategy))
bytes = len(plan.outline), plan.lower_bound_s, max(plan.bytes_by_sender.values())
seconds = time.process_time() - start
for rank in (0, 4095):
    mine = [bucket for bucket in plan.of_rank(rank)]
peak, = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]  # ru_maxrss counts the parent's too
gib = int(peak.split()[1]) / 2**20
wire = json.dumps(plan.to_wire(engines["count"] - 1))
print(json.dumps([seconds, time.process_time() - start, gib, plan.total_bytes, len(mine),
                  plan.bytes_by_sender.get(4095), len(wire) / 1e6]))
"""


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("config, engines", [
    (DEEPSEEK_V3, dict(count=32, tp=32, ep=32)), (MOE_1T, dict(count=32, tp=32)), (MOE_1T, dict(count=128, tp=8)),
], ids=["deepseek-v3", "1t-engines-of-32", "1t-engines-of-8"])
def test_four_thousand_ranks_are_planned_in_seconds(config, engines, strategy):
    """To 1,024 engine workers. On an idle core a plan takes 0.3 to 0.8 s, its wire form a second more; 0.1 GiB."""
    run = subprocess.run([sys.executable, "-c", SCALE, json.dumps([config, strategy, engines])], check=True,
                         timeout=300, capture_output=True, text=True)
    planned, with_wire, gib, total_bytes, buckets, sent, wire_mb = json.loads(run.stdout)
    assert planned < 20 and with_wire < 40 and gib < 0.5 and wire_mb < 12
    assert total_bytes > (2e12 if config is MOE_1T else 1.3e12)
    assert bool(buckets) == bool(sent) == (strategy != "broadcast")  # the last rank has its share


@pytest.mark.parametrize("change, message", [
    (dict(bucket_bytes=3), "bucket_bytes is 3"), (dict(dtype="int8"), "dtype 'int8' cannot be synced"),
    (dict(strategy="gossip"), "strategy 'gossip' is not known"),
])
def test_bad_options(change, message):
    with pytest.raises(ValueError, match=message):
        SyncOptions(**{"bucket_bytes": 100, "dtype": "float32", "te": False, **change})


def test_layouts_that_do_not_fit():
    with pytest.raises(ValueError, match="impossible trainer layout: tp 3 does not divide num_attention_heads 4"):
        small("auto", Layout(tp=3), EngineLayout())
    for sizes, message in [(dict(tp=0), "tp is 0"), (dict(tp=4, ep=3), "ep 3 does not divide the 4 workers"),
                           (dict(engine="sglang", tp=4, dp=3), "dp 3 does not divide tp 4")]:
        with pytest.raises(ValueError, match=message):
            EngineLayout(**sizes)
    with pytest.raises(ValueError, match="nic_gb_s is 0"):
        Network(nic_gb_s=0)


@pytest.mark.parametrize("tp, padded", [(8, 152576), (4, 152064)])
def test_qwens_vocabulary_leaves_unpadded(tp, padded):
    config = {**hf_config("qwen2"), "vocab_size": 151936, "num_attention_heads": 8, "num_key_value_heads": 8,
              "hidden_size": 64, "intermediate_size": 128}
    layout = Layout(tp=tp)
    assert layout.padded_vocab(151936) == padded
    for strategy in STRATEGIES:
        plan = plan_sync(model_spec(config), layout, EngineLayout(), SyncOptions(2**20, "bfloat16", False, strategy))
        boxes = boxes_to(plan, 0, 0)["model.embed_tokens.weight"]
        assert numel(boxes) == 151936 * 64 and max(box[0][1] for box in boxes) == 151936
