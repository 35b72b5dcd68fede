"""Pinned senders: each worker is served by its rank alone, from any layout, completely, evenly and bit for bit."""
from __future__ import annotations

import pytest
import torch

from mrl.reshard import EngineLayout, Layout, Network, SyncOptions, SyncPlan, plan_sync, read_config

from .simulate import Sync, load_everywhere, spec_of
from .test_views import sent_tensors

CASES = [  # as many workers as ranks, as colocated engines have
    ("qwen2", Layout(tp=2), 1, 2),
    ("qwen2", Layout(pp=2), 2, 1),
    ("qwen2", Layout(dp=2), 1, 2),
    ("qwen2", Layout(tp=2, pp=2), 1, 4),
    ("qwen2-mqa-tied", Layout(pp=2, dp=2), 2, 2),
    ("qwen3-moe", Layout(dp=2, ep=2), 2, 1),
    ("qwen3-moe", Layout(tp=2, dp=2, ep=2), 2, 2),
    ("qwen3-moe", Layout(tp=2, pp=2, dp=2, ep=2, etp=2), 4, 2),
    ("deepseek-v3", Layout(tp=2, dp=2, ep=4), 1, 4),
]


def pins(engines: EngineLayout) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(first, first + engines.world))
                 for first in range(0, engines.count * engines.world, engines.world))


def pinned_plan(variant: str, layout: Layout, count: int, tp: int, network: Network = Network(), spec=None) -> SyncPlan:
    engines = EngineLayout(count=count, tp=tp)
    options = SyncOptions(8_000, "float32", False, smallest_bytes=400, pinned=pins(engines))
    return plan_sync(spec or spec_of(variant), layout, engines, options, network)


@pytest.mark.parametrize("variant, layout, count, tp", CASES, ids=str)
def test_every_worker_gets_everything_from_its_own_rank(variant, layout, count, tp, model_dir):
    """Two syncs, the second after an in-place update, as every rank and worker plays its own share of the plan."""
    directory = model_dir(variant)
    spec = spec_of(variant, read_config(directory))
    plan = pinned_plan(variant, layout, count, tp, spec=spec)
    assert plan.strategy == "multi_sender" and {brief.mode for brief in plan.outline} == {"slices"}
    for brief in plan.outline:
        (engine,) = brief.engines
        assert [one.sender for one in brief.slices] == [engine * tp + worker for worker in range(tp)]
    params, expected = load_everywhere(directory, spec, layout, te=False), sent_tensors(directory, variant)
    sync = Sync(plan, params)
    for sign in (1, -1):
        for received in sync.run().values():  # where nothing may come twice
            assert received.keys() == expected.keys()
            assert all(torch.equal(received[name], sign * tensor) for name, tensor in expected.items())
        for rank in params:
            torch._foreach_neg_(list(rank.values()))


@pytest.mark.parametrize("variant, layout, count, tp", CASES, ids=str)
def test_shares_are_even_and_all_views_of_a_plan_agree(variant, layout, count, tp):
    plan = pinned_plan(variant, layout, count, tp)
    sent, received = plan.bytes_by_sender, plan.bytes_by_worker
    assert sent.keys() == set(range(layout.world)) and sum(received) == plan.total_bytes
    assert max(sent.values()) <= 1.25 * min(sent.values())
    takes_part: dict[int, list[int]] = {rank: [] for rank in range(layout.world)}
    gathered = [0] * layout.world
    for index, brief in enumerate(plan.outline):
        bucket = plan.bucket(index)
        for short, one in zip(brief.slices, bucket.slices, strict=True):
            assert (short.ranks, short.sender, short.nbytes) == (one.ranks, one.sender, 4 * one.numel)
            if one.numel:
                assert len(one.shards) == len(one.ranks)
                given = [sum(part.numel for part in shard) for shard in one.shards]
                assert sum(given) == one.numel
                gathered[one.sender] += 4 * (one.numel - given[one.ranks.index(one.sender)])
        for rank in {rank for one in bucket.slices if one.numel for rank in one.ranks}:
            takes_part[rank].append(index)
    assert takes_part == {rank: [bucket.index for bucket in plan.of_rank(rank)] for rank in takes_part}
    assert sum(plan.schedule.totals.gathered) == pytest.approx(sum(gathered), rel=0.1)
    for engine in range(count):
        senders, wire = plan.senders(engine), plan.to_wire(engine)
        assert senders == tuple(range(engine * tp, engine * tp + tp)) and wire["senders"] == tp
        assert all(entry["sender"] == worker for bucket in wire["buckets"]
                   for worker, entry in enumerate(bucket["slices"]) if entry["numel"])


def test_a_slice_comes_from_the_replica_of_its_sender():
    """With two stages of two replicas of two tp ranks, ranks 2 and 3 hold what 6 and 7 send of the first stage."""
    plan = pinned_plan("qwen2", Layout(tp=2, pp=2, dp=2), 2, 4)
    groups = {(brief.stage, one.sender): one.ranks for brief in plan.outline for one in brief.slices if one.nbytes}
    assert groups == {
        (0, 0): (0, 1), (0, 1): (0, 1), (0, 2): (2, 3), (0, 3): (2, 3),
        (0, 4): (0, 1, 4), (0, 5): (0, 1, 5), (0, 6): (2, 3, 6), (0, 7): (2, 3, 7),
        (1, 0): (4, 5, 0), (1, 1): (4, 5, 1), (1, 2): (6, 7, 2), (1, 3): (6, 7, 3),
        (1, 4): (4, 5), (1, 5): (4, 5), (1, 6): (6, 7), (1, 7): (6, 7)}


def test_copies_inside_a_gpu_take_no_network():
    slow = Network(gpus_per_node=8, nic_gb_s=1e-9, nvlink_gb_s=1e-6, latency_s=0.0)  # 1 byte/s, and 1,000
    assert pinned_plan("qwen2", Layout(), 1, 1, slow).lower_bound_s == 0
    gathering = pinned_plan("qwen2", Layout(tp=2), 1, 2, slow)
    assert gathering.lower_bound_s == pytest.approx(gathering.total_bytes / 2 / 1000, rel=0.1)  # passed on
    across = Network(gpus_per_node=1, nic_gb_s=1e-9, nvlink_gb_s=1e-6, latency_s=0.0)
    assert pinned_plan("qwen2", Layout(pp=2), 2, 1, across).lower_bound_s > gathering.lower_bound_s * 100


@pytest.mark.parametrize("pinned, engines, words", [
    (((0, 1),), EngineLayout(count=2, tp=2), "a rank for each of 2 workers of 2 engines"),
    (((0,), (1,)), EngineLayout(count=2, tp=2), "a rank for each of 2 workers of 2 engines"),
    (((0, 4),), EngineLayout(tp=2), r"names ranks \[4\], which are not in 0…3"),
    (((0, 1, 2, 3),), EngineLayout(tp=4, gpus_per_node=2), "4 workers, which do not divide the 2 GPUs"),
])
def test_pins_that_do_not_fit_are_refused(pinned, engines, words):
    with pytest.raises(ValueError, match=words):
        plan_sync(spec_of("qwen2"), Layout(tp=2, dp=2), engines, SyncOptions(8_000, "float32", False, pinned=pinned))


@pytest.mark.parametrize("strategy", ["broadcast", "sharded"])
def test_strategies_that_choose_their_senders_are_refused(strategy):
    with pytest.raises(ValueError, match=f"'{strategy}' chooses its senders itself"):
        SyncOptions(8_000, "float32", False, strategy, pinned=((0,),))
