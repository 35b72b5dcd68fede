"""`mrl check`: what an experiment would do, computed from the file and the model's config.json alone.

No GPU, engine, torchrun or torch is needed. `resolve_plan` computes, `show_plan` and `show_keys` print.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from rich.console import Console
from rich.table import Table

from mrl.cluster.placement import Placement, assign
from mrl.config.checks import resolved_device
from mrl.config.errors import Problem
from mrl.config.keys import leaf_keys
from mrl.config.schema import Experiment
from mrl.engine.probe import look_into
from mrl.engine.versions import version_warning
from mrl.reshard.layout import Layout
from mrl.reshard.params import hf_tensors, local_params
from mrl.reshard.plan import DTYPE_BYTES, SyncPlan, plan_sync
from mrl.reshard.spec import ModelSpec, model_spec

_MAX_ROWS = 32  # of a table with one row a rank or engine
_FP32_BYTES = 4

Rows = Sequence[tuple[str, ...]]


@dataclass(frozen=True)
class Plan:
    """A checked experiment, resolved: everything the tables are made of."""

    exp: Experiment
    spec: ModelSpec
    layout: Layout
    device: str
    placement: Placement
    sync: SyncPlan


@dataclass(frozen=True)
class RankMemory:
    """Bytes a trainer rank needs, activations not included.

    Attributes:
        weights: in `model.dtype`.
        gradients: accumulated in float32.
        optimizer: Adam's two moments, and the float32 master weights of a bfloat16 model; split over replicas.
        sync: the buffers of a sync on the rank that sends a stage: its contribution and the flat buckets.
    """

    weights: int
    gradients: int
    optimizer: int
    sync: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.sync


def resolve_plan(exp: Experiment, hf_config: dict[str, Any], visible_gpus: int | None) -> Plan:
    """The plan of an experiment that passed its checks (`mrl.preflight`), with the devices numbered from 0."""
    spec = model_spec(hf_config)
    parallel = exp.trainer.parallel
    layout = Layout(tp=parallel.tp, pp=parallel.pp, dp=exp.data_parallel)
    device = resolved_device(exp, visible_gpus)
    sync = plan_sync(spec, layout, int(exp.sync.bucket_mb * 2**20), exp.model.dtype, te=device == "cuda")
    return Plan(exp, spec, layout, device, assign(exp, visible=None), sync)


def rank_memory(plan: Plan, rank: int) -> RankMemory:
    """Memory of one trainer rank, from the shapes of the parameters it holds."""
    layout, itemsize = plan.layout, DTYPE_BYTES[plan.exp.model.dtype]
    coord = layout.coord(rank)
    held = sum(param.numel for param in local_params(plan.spec, layout, coord, te=plan.device == "cuda"))
    state = 2 * _FP32_BYTES + (0 if itemsize == _FP32_BYTES else _FP32_BYTES)
    largest = max(bucket.numel for bucket in plan.sync.buckets if bucket.stage == coord.pp)
    gathered = plan.sync.max_local_numel + plan.exp.sync.buffers * largest
    sends = rank == layout.sender(coord.pp)
    return RankMemory(held * itemsize, held * _FP32_BYTES, ceil(held * state / layout.dp),
                      gathered * itemsize if sends else 0)


def parameter_count(spec: ModelSpec) -> int:
    """Elements of the model's checkpoint, tied embeddings counted once."""
    return sum(prod(shape) for shape in hf_tensors(spec).values())


def show_plan(console: Console, plan: Plan, bandwidth_gbs: float | None) -> None:
    """Print the plan. `bandwidth_gbs`: 10^9 bytes/s from a sender to an engine, for the lower bound of a sync."""
    console.print(f"[bold]{plan.exp.name}[/bold]: {plan.spec.family.architecture}, "
                  f"{parameter_count(plan.spec):,} parameters, {plan.exp.model.dtype} on {plan.device}, "
                  f"{plan.exp.loop.mode}, {plan.exp.loop.steps} steps")
    _show(console, "Partitions", ("partition", "devices", "processes"), _partition_rows(plan))
    _show(console, "Trainer ranks", ("rank", "tp", "pp", "dp", "layers", "sends stage"), _rank_rows(plan))
    _show(console, "Engines", ("engine", "tp", "devices", "weights a device"), _engine_rows(plan))
    _show(console, "Batch", ("what", "value"), _batch_rows(plan))
    _show(console, "Memory a trainer rank (without activations)",
          ("rank", "weights", "gradients", "optimizer", "sync buffers", "total"), _memory_rows(plan))
    if plan.exp.algorithm.kl.coef > 0:
        console.print("The reference model adds its weights once more a rank, in host memory.")
    _show(console, "Weight sync", ("what", "value"), _sync_rows(plan, bandwidth_gbs))


def show_engine_version(console: Console, exp: Experiment) -> None:
    """Print the version of the engine that rollout.python holds, if it can be found on this machine."""
    found = look_into(exp.rollout.python, exp.rollout.engine)
    if found.problem is None:
        console.print(f"engine: {exp.rollout.engine} {found.version or '(its version is not known)'}", highlight=False)
        if warning := version_warning(exp.rollout.engine, found.version):
            console.print(f"warning: {warning}", style="yellow", markup=False)


def show_warnings(console: Console, problems: Sequence[Problem]) -> None:
    """Print what is no problem for a plan, but would be for `mrl train` on this machine."""
    for problem in problems:
        console.print(f"warning: not on this machine: {problem.key} = {problem.value} ({problem.remedy})",
                      style="yellow", markup=False)


def show_keys(console: Console) -> None:
    """Print every key of the experiment file with its type, default and meaning."""
    rows = [(key.name, key.type, key.default, key.description) for key in leaf_keys()]
    _show(console, "Keys of the experiment file", ("key", "type", "default", "meaning"), rows)


def _show(console: Console, title: str, columns: Sequence[str], rows: Rows) -> None:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _capped(rows: list[tuple[str, ...]], count: int) -> Rows:
    """The rows, and a last one that says how many of `count` were left out."""
    left = count - len(rows)
    return rows if not left else [*rows, (f"… {left} more", *[""] * (len(rows[0]) - 1))]


def _devices(plan: Plan, devices: Sequence[str]) -> str:
    """Consecutive devices, as text."""
    unit = "GPU" if plan.device == "cuda" else "CPU process"
    return f"{unit} {devices[0]}" if len(devices) == 1 else f"{unit} {devices[0]}-{devices[-1]}"


def _partition_rows(plan: Plan) -> Rows:
    exp, placement = plan.exp, plan.placement
    trainers = f"{len(placement.trainers)} trainer rank(s)"
    engines = f"{exp.engine_count} engine(s) of tp {exp.rollout.parallel.tp}, {exp.rollout.workers} rollout worker(s)"
    if exp.loop.mode == "colocated_sync":
        return [("shared", _devices(plan, placement.trainers), f"{trainers}; {engines}")]
    rollout = [device for engine in placement.engines for device in engine]
    return [("trainer", _devices(plan, placement.trainers), trainers), ("rollout", _devices(plan, rollout), engines)]


def _rank_rows(plan: Plan) -> Rows:
    layout = plan.layout
    rows = []
    for rank in range(min(layout.world, _MAX_ROWS)):
        at = layout.coord(rank)
        chunks = [layout.layers(plan.spec.num_layers, at.pp, chunk) for chunk in range(layout.vpp)]
        rows.append((str(rank), str(at.tp), str(at.pp), str(at.dp),
                     ", ".join(f"{layers[0]}-{layers[-1]}" for layers in chunks),
                     "yes" if rank == layout.sender(at.pp) else ""))
    return _capped(rows, layout.world)


def _engine_rows(plan: Plan) -> Rows:
    tp, engines = plan.exp.rollout.parallel.tp, plan.placement.engines
    weights = f"{_size(plan.sync.total_bytes / tp)} (about)"
    rows = [(str(index), str(tp), _devices(plan, devices), weights)
            for index, devices in enumerate(engines[:_MAX_ROWS])]
    return _capped(rows, len(engines))


def _batch_rows(plan: Plan) -> Rows:
    exp, batch = plan.exp, plan.exp.batch
    samples = batch.prompts_per_step * batch.samples_per_prompt
    per_minibatch = samples // batch.minibatches
    per_replica = ceil(per_minibatch / plan.layout.dp)
    longest = exp.data.max_prompt_tokens + exp.rollout.sampling.max_response_tokens
    # A microbatch takes at least this many of the longest samples, and never fewer than one.
    at_once = max(1, batch.max_tokens_per_microbatch // longest)
    return [
        ("samples a step", f"{batch.prompts_per_step} prompts × {batch.samples_per_prompt} = {samples}"),
        ("optimizer steps a step", f"{batch.minibatches} minibatch(es) × {batch.epochs} epoch(s) = "
                                   f"{batch.minibatches * batch.epochs}"),
        ("samples a minibatch", f"{per_minibatch}, at most {per_replica} on each of {plan.layout.dp} replica(s) when "
                                "all are equally long"),
        ("longest sample", f"{longest} tokens"),
        ("tokens a step", f"at most {samples * longest:,}"),
        ("microbatches", f"at most {ceil(per_replica / at_once)} a minibatch and replica, of "
                         f"{batch.max_tokens_per_microbatch} tokens"),
    ]


def _memory_rows(plan: Plan) -> Rows:
    rows = []
    for rank in range(min(plan.layout.world, _MAX_ROWS)):
        memory = rank_memory(plan, rank)
        rows.append((str(rank), *map(_size, (memory.weights, memory.gradients, memory.optimizer, memory.sync,
                                             memory.total))))
    return _capped(rows, plan.layout.world)


def _sync_rows(plan: Plan, bandwidth_gbs: float | None) -> Rows:
    sync, engines = plan.sync, plan.exp.engine_count
    largest = max(bucket.nbytes for bucket in sync.buckets)
    tensors = sum(len(bucket.items) for bucket in sync.buckets)
    rows = [
        ("links", f"{engines}: {plan.layout.pp} sender(s) to each engine's {plan.exp.rollout.parallel.tp} worker(s)"),
        ("tensors", f"{tensors} in {len(sync.buckets)} bucket(s) of at most {plan.exp.sync.bucket_mb:g} MiB"),
        ("largest bucket", _size(largest)),
        ("bytes an engine worker receives", _size(sync.total_bytes)),
        ("receive buffers a worker", f"{plan.exp.sync.buffers} × {_size(largest)}"),
        ("transport", plan.exp.sync.transport),
    ]
    if bandwidth_gbs:
        seconds = sync.total_bytes / (bandwidth_gbs * 1e9)
        rows.append((f"floor at {bandwidth_gbs:g} GB/s", f"{seconds:.3g} s to one worker; links that share the "
                     f"sender's bandwidth add up, to {seconds * engines:.3g} s"))
    return rows


def _size(count: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"
