"""From an experiment to its sync plan: what `mrl check` shows is what the trainer ranks do. Needs no torch."""
from __future__ import annotations

from dataclasses import replace

from mrl.cluster.placement import ranks_beside
from mrl.config.schema import Experiment
from mrl.reshard.layout import Layout
from mrl.reshard.network import Network
from mrl.reshard.plan import SyncOptions, SyncPlan, plan_sync
from mrl.reshard.spec import ModelSpec

MIB = 1 << 20


def with_transport(experiment: Experiment, device: str) -> Experiment:
    """The experiment with `sync.transport: auto` decided; device: "cpu" or "cuda".

    Between GPUs NCCL, within a GPU (it refuses two ranks there) copies, where these can be planned; else gloo.
    """
    sync = experiment.sync
    if sync.transport != "auto":
        return experiment
    one_sender_each = sync.strategy in ("auto", "multi_sender") and (
        experiment.cluster.gpus_per_node % experiment.rollout.parallel.tp == 0)
    transport = "gloo"
    if device == "cuda":
        apart = experiment.loop.mode == "one_step_overlap"
        transport = "nccl" if apart else "cuda_ipc" if one_sender_each else "gloo"
    return experiment.model_copy(update={"sync": sync.model_copy(update={"transport": transport})})


def receive_buffers(experiment: Experiment) -> int:
    """Buckets that an engine's worker has room for. None where it reads them in the memory of a rank on its GPU: it
    neither joins slices of them with other workers nor applies changes to them. The transport is decided."""
    sync = experiment.sync
    within_memory = sync.transport == "cuda_ipc" and experiment.rollout.parallel.tp == 1 and not sync.delta
    return 0 if within_memory else sync.buffers


def plan_of(
    experiment: Experiment, spec: ModelSpec, layout: Layout, te: bool, not_sharded: frozenset[str] = frozenset(),
) -> SyncPlan:
    """The plan of every sync of a run, whose transport is decided. `te`, `not_sharded`: see `SyncOptions`."""
    sync, cluster, rollout = experiment.sync, experiment.cluster, experiment.rollout
    engines = rollout.parallel.layout(rollout.engine, experiment.engine_count, cluster.gpus_per_node)
    options = SyncOptions(strategy=_strategy(experiment), bucket_bytes=int(sync.bucket_mb * MIB), te=te,
                          dtype=experiment.model.dtype, not_sharded=not_sharded,
                          fp8=experiment.rollout.quantization == "fp8",
                          pinned=ranks_beside(experiment) if sync.transport == "cuda_ipc" else None)
    network = Network(gpus_per_node=cluster.gpus_per_node, nic_gb_s=cluster.nic_gb_s, nvlink_gb_s=cluster.nvlink_gb_s)
    # Engines do not load the layers that predict further tokens.
    return plan_sync(replace(spec, mtp_layers=0), layout, engines, options, network)


def _strategy(experiment: Experiment) -> str:
    """sync.strategy, with `auto` decided where the time of transfers is not what counts: engines share one's files."""
    auto = experiment.sync.strategy == "auto"
    return "broadcast" if auto and experiment.sync.transport == "disk" else experiment.sync.strategy
