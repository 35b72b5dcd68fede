"""Seconds a plan takes on a described network: a bound that nothing beats, and what is to be expected.

With B(x) the bytes that x sends or takes in one sync, and NIC and NVLINK the bandwidths of one GPU:

    send      max over ranks    B(rank to engines) / NIC
    receive   max over workers  B(worker from trainers) / NIC
    gather    max over ranks    B(rank from the others of its gather group) / NVLINK, or NIC where a group spans nodes
    pass on   max over workers  B(worker from the others of its node) / NVLINK

Where workers share their senders' GPUs, sending and receiving is a copy inside a GPU and counts for nothing.

All four go on at once, so that the largest is the bound. Expected is more: every message costs the latency, the
pipeline has to fill with a bucket that is gathered and to drain with one that is passed on, and the broadcasts of
several engines leave through the one sender whose turn it is.
"""
from __future__ import annotations

from mrl.reshard.network import Network
from mrl.reshard.schedule import Schedule

_GB = 1e9


def lower_bound_s(schedule: Schedule, network: Network) -> float:
    """Seconds that no execution can beat."""
    totals = schedule.totals
    nic, nvlink = network.nic_gb_s * _GB, network.nvlink_gb_s * _GB
    to_engines = 0.0 if schedule.within_gpus else max(totals.sent.max(), totals.received.max()) / nic
    return float(max(to_engines,
               totals.gathered.max() / (nvlink if _gathers_inside_nodes(schedule, network) else nic),
               totals.passed_on.max() / nvlink))


def predicted_s(schedule: Schedule, network: Network) -> float:
    """Seconds to be expected."""
    totals = schedule.totals
    nic, nvlink = network.nic_gb_s * _GB, network.nvlink_gb_s * _GB
    wire = lower_bound_s(schedule, network)
    if schedule.strategy == "broadcast":
        wire = max(wire, totals.received.max() * schedule.engines.count / nic)
    messages = max(totals.sends.max(), totals.receives.max()) * network.latency_s
    steps = [step for track in schedule.tracks for step in track.steps]
    ends = max(sum(schedule.gathered_bytes(step, load) + schedule.sent_bytes(step, load) for load in step.loads)
               for step in steps)
    return float(wire + messages + ends / nvlink)


def _gathers_inside_nodes(schedule: Schedule, network: Network) -> bool:
    """Whether every gather group, with the ranks that send for it, stays on one trainer node."""
    if schedule.within_gpus:  # a sender may be on any stage
        return schedule.groups[0].layout.world <= network.gpus_per_node
    return all(network.gpus_per_node % group.size == 0 for group in schedule.groups)
