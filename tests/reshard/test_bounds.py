"""Times of plans, derived by hand from bytes and bandwidths."""
from __future__ import annotations

import pytest

from mrl.reshard import EngineLayout, Layout, Network, SyncOptions, plan_sync

from .simulate import spec_of

SLOW = Network(gpus_per_node=8, nic_gb_s=1e-6, nvlink_gb_s=1e-5, latency_s=0.0)  # 1,000 bytes/s, and 10,000


def plan(strategy: str, layout: Layout, engines: EngineLayout, network: Network = SLOW):
    options = SyncOptions(4_000, "float32", False, strategy, smallest_bytes=1)
    return plan_sync(spec_of("qwen2"), layout, engines, options, network)


def test_a_broadcast_is_received_whole():
    made = plan("broadcast", Layout(), EngineLayout(count=1, tp=2))
    assert made.lower_bound_s == pytest.approx(made.total_bytes / 1000)
    # Two buckets' worth of NVLink time, to fill and drain, is all that is added.
    assert made.predicted_s == pytest.approx(made.lower_bound_s + 2 * made.max_bucket_bytes / 10_000)


def test_one_sender_serves_all_engines_by_broadcast():
    made = plan("broadcast", Layout(pp=2), EngineLayout(count=3))
    assert made.lower_bound_s == pytest.approx(max(made.bytes_by_sender.values()) / 1000)
    assert made.predicted_s == pytest.approx(3 * made.total_bytes / 1000 + 2 * made.max_bucket_bytes / 10_000)


def test_slices_divide_what_a_worker_receives():
    made = plan("multi_sender", Layout(dp=4), EngineLayout(count=1, tp=4))
    assert made.lower_bound_s == pytest.approx(max(made.bytes_by_worker) / 1000)
    assert made.lower_bound_s == pytest.approx(made.total_bytes / 4 / 1000, rel=0.1)


def test_passing_slices_on_can_be_what_takes_longest():
    network = Network(nic_gb_s=1e-6, nvlink_gb_s=1e-6, latency_s=0.0)
    made = plan("multi_sender", Layout(dp=4), EngineLayout(count=1, tp=4), network)
    assert made.lower_bound_s == pytest.approx(made.total_bytes * 3 / 4 / 1000, rel=0.1)


def test_gathers_that_leave_a_node_go_through_the_network():
    """Four ranks gather three quarters each of what they send; the engines take a quarter a worker."""
    inside = plan("multi_sender", Layout(tp=4), EngineLayout(count=1, tp=4))
    across = plan("multi_sender", Layout(tp=4), EngineLayout(count=1, tp=4),
                  Network(gpus_per_node=2, nic_gb_s=1e-7, nvlink_gb_s=1e-5, latency_s=0.0))
    assert across.lower_bound_s == pytest.approx(10 * inside.lower_bound_s)
    assert max(across.bytes_by_sender.values()) / 100 <= across.lower_bound_s


def test_latency_counts_for_every_message_of_the_busiest():
    quick = plan("multi_sender", Layout(), EngineLayout())
    late = plan("multi_sender", Layout(), EngineLayout(), Network(8, 1e-6, 1e-5, latency_s=2.0))
    assert late.predicted_s - quick.predicted_s == pytest.approx(2.0 * len(quick.outline))
    assert late.lower_bound_s == quick.lower_bound_s


def test_sharded_is_bound_by_what_a_worker_holds():
    layout, engines = Layout(tp=2, dp=2), EngineLayout(count=1, tp=4, gpus_per_node=2)
    made = plan("sharded", layout, engines)
    whole = plan("multi_sender", layout, engines)
    assert made.lower_bound_s == pytest.approx(max(made.bytes_by_worker) / 1000)
    assert made.lower_bound_s < whole.lower_bound_s
