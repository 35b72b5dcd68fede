"""`mrl check`: what an experiment would do, computed from the file and the model's config.json alone.

No GPU, engine, torchrun or torch is needed. `resolve_plan` computes, `show_plan` and `show_keys` print.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mrl import environment, rates
from mrl.cluster.placement import Placement, assign
from mrl.config.checks import resolved_device
from mrl.config.errors import Problem
from mrl.config.keys import leaf_keys, part_keys
from mrl.config.schema import Experiment, Rollout, Teacher
from mrl.engine.probe import look_into
from mrl.engine.versions import version_warning
from mrl.reshard.boxes import numel, whole
from mrl.reshard.buckets import BYTES, DTYPE_BYTES
from mrl.reshard.engine_layout import held_boxes
from mrl.reshard.fp8 import places
from mrl.reshard.layout import Coord, Layout, expert_range
from mrl.reshard.params import ParamPlan, gather_groups, hf_tensors, is_expert, is_output, local_params
from mrl.reshard.plan import SyncPlan
from mrl.reshard.spec import ModelSpec, model_spec
from mrl.stream.planning import plan_of, receive_buffers, with_transport

_MAX_ROWS = 32  # of a table with one row a rank or engine
_FP32_BYTES = 4

Rows = Sequence[tuple[str, ...]]


@dataclass(frozen=True)
class Plan:
    """A checked experiment, resolved: everything the tables are made of."""

    exp: Experiment
    spec: ModelSpec
    critic: ModelSpec | None
    layout: Layout
    device: str
    placement: Placement
    sync: SyncPlan


@dataclass(frozen=True)
class RankMemory:
    """Bytes a trainer rank needs, activations not included; of the policy and the critic together.

    Attributes:
        weights: in `model.dtype`.
        gradients: accumulated in `grad_dtype` of the model's optimizer.
        optimizer: Adam's two moments, and the float32 master weights of a bfloat16 model; split over replicas.
        host: of host memory, with `cpu_offload`: moments, masters and their gradients; not part of the total.
        sync: at most, the buffers of a sync: the ring of slices it sends, and the pieces of one that are gathered, or
            quantised.
    """

    weights: int
    gradients: int
    optimizer: int
    host: int
    sync: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.sync


def resolve_plan(exp: Experiment, hf_config: dict[str, Any], visible_gpus: int | None,
                 critic_config: dict[str, Any] | None = None) -> Plan:
    """The plan of an experiment that passed its checks (`mrl.preflight`), with the devices numbered from 0.

    `critic_config`: config.json of `algorithm.critic.path`, where that is given.
    """
    spec = model_spec(hf_config, exp.model.mtp)
    critic = model_spec(critic_config or hf_config) if exp.algorithm.has_critic else None
    layout = exp.trainer.parallel.layout(exp.trainer_ranks)
    device = resolved_device(exp, visible_gpus)
    exp = with_transport(exp, device)
    sync = plan_of(exp, spec, layout, te=device == "cuda")
    return Plan(exp, spec, critic, layout, device, assign(exp, visible=None), sync)


def rank_memory(plan: Plan, rank: int) -> RankMemory:
    """Memory of one trainer rank, from the shapes of the parameters it holds."""
    layout, itemsize, te = plan.layout, DTYPE_BYTES[plan.exp.model.dtype], plan.device == "cuda"
    coord = layout.coord(rank)
    models = [(local_params(plan.spec, layout, coord, te), plan.exp.trainer.optimizer)]
    if plan.critic:  # its value head is too small to count
        critic = [param for param in local_params(plan.critic, layout, coord, te) if not is_output(param.name)]
        models.append((critic, plan.exp.algorithm.critic.optimizer))
    weights, gradients, state = 0, 0, {False: 0, True: 0}  # whether on the host -> bytes
    for params, optimizer in models:
        held = sum(param.numel for param in params)
        weights += held * itemsize
        gradients += held * DTYPE_BYTES[optimizer.grad_dtype]
        copies = 4 if optimizer.cpu_offload else 2 if itemsize == _FP32_BYTES else 3
        state[optimizer.cpu_offload] += ceil(_sharded(params, layout) * copies * _FP32_BYTES)
    return RankMemory(weights, gradients, *state.values(), _sync_bytes(plan, rank))


def _sharded(params: list[ParamPlan], layout: Layout) -> float:
    """Elements of a rank's parameters that its optimizer steps, as many on every replica."""
    replicas = {False: layout.dp, True: layout.tp * layout.dp // (layout.ep * layout.etp)}
    return sum(param.numel / replicas[is_expert(param.name)] for param in params)


def _sync_bytes(plan: Plan, rank: int) -> int:
    slices = [(bucket.dtype, one) for bucket in plan.sync.outline_of_rank(rank) for one in bucket.slices
              if rank in one.ranks]
    mine = [(dtype, one) for dtype, one in slices if one.sender == rank]
    in_slots = [one for dtype, one in mine if receive_buffers(plan.exp) or dtype == BYTES or len(one.ranks) > 1]
    sent = max((one.nbytes for one in in_slots), default=0)
    gathered = max((one.gathered for _, one in mine if len(one.ranks) > 1), default=0)
    quantised = max((one.gathered for dtype, one in mine if dtype == BYTES), default=0)
    packed = max((one.gathered for _, one in slices if one.sender != rank), default=0)
    kept = sum(one.nbytes for _, one in mine) if plan.exp.sync.delta else 0
    return plan.exp.sync.buffers * sent + gathered + quantised + packed + kept


def parameter_count(spec: ModelSpec) -> int:
    """Elements of the model's checkpoint, tied embeddings counted once."""
    return sum(prod(shape) for shape in hf_tensors(spec).values())


def engine_weights(plan: Plan, worker: int) -> int:
    """Bytes of the model's tensors that one worker of an engine holds, by `held_boxes`; whole where that cannot say."""
    held, engines = 0, plan.sync.engine_layout
    for group in gather_groups(plan.spec, Layout(), plan.sync.options.fp8):
        for number, entry in enumerate(group.entries):
            for at, tensor in enumerate(group.tensors(number)):
                boxes = held_boxes(entry.rule, at, tensor.shape, entry.expert, plan.spec, engines, worker)
                boxes = (whole(tensor.shape),) if boxes is None else boxes
                held += places(boxes).nbytes if group.fp8 else (
                    sum(map(numel, boxes)) * DTYPE_BYTES[group.dtype or plan.exp.model.dtype])
    return held


def show_plan(console: Console, plan: Plan) -> None:
    """Print the plan."""
    console.print(f"[bold]{plan.exp.name}[/bold]: {plan.spec.family.architecture}, "
                  f"{parameter_count(plan.spec):,} parameters, {plan.exp.model.dtype} on {plan.device}, "
                  f"{plan.exp.loop.mode}, {plan.exp.loop.steps} steps")
    _show(console, "Partitions", ("partition", "devices", "processes"), _partition_rows(plan))
    experts = ("experts",) if plan.spec.moe else ()
    _show(console, "Trainer ranks", ("rank", "tp", "pp", "dp", "layers", "sends in a sync", *experts), _rank_rows(plan))
    _show(console, "Engines", ("engine", "split", "devices", "weights a device"), _engine_rows(plan))
    _show(console, "Batch", ("what", "value"), _batch_rows(plan))
    _show(console, f"Memory a trainer rank ({'with the critic, ' if plan.critic else ''}without activations)",
          ("rank", "weights", "gradients", "optimizer", "sync buffers", "total"), _memory_rows(plan))
    if host := rank_memory(plan, 0).host:
        console.print(f"cpu_offload adds {_size(host)} a rank in host memory.")
    if plan.exp.loop.mode == "colocated_sync" and plan.device == "cuda":
        _show(console, "Memory of a shared GPU by turn (without activations, contexts and CUDA graphs)",
              ("turn", "trainer rank", "engine worker", "together"), _turn_rows(plan))
    if plan.exp.algorithm.kl.coef > 0:
        console.print("The reference model adds its weights once more a rank, in host memory.")
    _show(console, "Weight sync", ("what", "value"), _sync_rows(plan))


def show_engine_version(console: Console, exp: Experiment) -> None:
    """Print the version of the engine that rollout.python holds, if it can be found on this machine."""
    found = look_into(exp.rollout.python, exp.rollout.engine)
    if found.problem is None:
        console.print(f"engine: {exp.rollout.engine} {found.version or '(its version is not known)'}", highlight=False)
        if warning := version_warning(exp.rollout.engine, found.version):
            console.print(f"warning: {warning}", style="yellow", markup=False)


def show_environment(console: Console, exp: Experiment | None) -> None:
    """Print what is installed here for trainers, and the engine of an experiment, or all engines without one."""
    _show(console, "Trainers", ("package", "found", "what it buys", "without it"), environment.trainer_rows())
    _show(console, "Engines", ("engine", "found", "where", "what it buys", "without it"), environment.engine_rows(exp))


def show_rates(console: Console, exp: Experiment, run_dir: Path, gpus: int | None) -> None:
    """Print how a run's timings would have the experiment's GPUs split."""
    found = rates.report(exp, run_dir, gpus)
    run, best, shared, taught = found["rates"], found["splits"], found["colocated"], exp.teacher is not None
    teacher = f", teacher {run.teaching:.1f} GPU-seconds" if taught else ""
    console.print(f"{run_dir}, median of {run.steps} steps: generation {run.generation:.1f} GPU-seconds, training "
                  f"{run.training:.1f} GPU-seconds{teacher}, sync {run.sync:.2f} s", highlight=False)
    parts = ("trainer", "rollout", *(["teacher"] if taught else []))
    _show(console, f"one_step_overlap on {found['gpus']} GPUs, if all parts scale with theirs",
          (*(f"cluster.{part}_gpus" for part in parts), "step", *(f"{part} idle" for part in parts)),
          [(*(str(getattr(split, f"{part}_gpus")) for part in parts), f"{split.step_s:.2f} s",
            *(f"{getattr(split, f'{part}_idle'):.0%}" for part in parts)) for split in best])
    chosen = " ".join(f"cluster.{part}_gpus={getattr(best[0], f'{part}_gpus')}" for part in parts)
    console.print(f"colocated_sync on {shared.gpus}{f' and {shared.teacher_gpus} for the teacher' if taught else ''}: "
                  f"{shared.step_s:.2f} s, and the time to hand over memory. Use {chosen}, and measure again.",
                  highlight=False)


def show_warnings(console: Console, problems: Sequence[Problem]) -> None:
    """Print what is no problem for a plan, but would be for `mrl train` on this machine."""
    for problem in problems:
        console.print(f"warning: not on this machine: {problem.key} = {problem.value} ({problem.remedy})",
                      style="yellow", markup=False)


def show_keys(console: Console) -> None:
    """Print every key of the experiment file with its type, default and meaning."""
    rows = [(key.name, key.type, key.default, key.description) for key in leaf_keys()]
    _show(console, "Keys of the experiment file", ("key", "type", "default", "meaning"), rows)
    rows = [(kinds, key.name, key.type, key.default, key.description) for kinds, key in part_keys()]
    _show(console, "Keys of a part of the reward", ("kind", "key", "type", "default", "meaning"), rows)


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
    engines = f"{exp.engine_count} engine(s) of {_engine_sizes(exp.rollout)}, {exp.rollout.workers} rollout worker(s)"
    teaching = [device for engine in placement.teachers for device in engine]
    teachers = [("teacher", _devices(plan, teaching), f"{exp.teacher_count} engine(s) of {_engine_sizes(exp.teacher)}, "
                 f"{exp.teacher.engine}")] if teaching else []
    if exp.loop.mode == "colocated_sync":
        return [("shared", _devices(plan, placement.trainers), f"{trainers}; {engines}"), *teachers]
    rollout = [device for engine in placement.engines for device in engine]
    return [("trainer", _devices(plan, placement.trainers), trainers), ("rollout", _devices(plan, rollout), engines),
            *teachers]


def _engine_sizes(section: Rollout | Teacher) -> str:
    """How an engine is split, as text."""
    parallel = section.parallel
    others = [f"{name} {size}" for name, size in (("ep", parallel.ep), ("dp", parallel.dp)) if size > 1]
    return " ".join([f"tp {parallel.tp}", *others])


def _rank_rows(plan: Plan) -> Rows:
    layout, sent = plan.layout, plan.sync.bytes_by_sender
    rows = []
    for rank in range(min(layout.world, _MAX_ROWS)):
        at = layout.coord(rank)
        chunks = [layout.layers(plan.spec.num_layers, at.pp, chunk) for chunk in range(layout.vpp)]
        rows.append((str(rank), str(at.tp), str(at.pp), str(at.dp),
                     ", ".join(f"{layers[0]}-{layers[-1]}" for layers in chunks),
                     _size(sent[rank]) if rank in sent else "", *_expert_cells(plan, at)))
    return _capped(rows, layout.world)


def _expert_cells(plan: Plan, at: Coord) -> tuple[str, ...]:
    """Which experts of each of its layers a rank holds, and which slice of them; nothing for a dense model."""
    if plan.spec.moe is None:
        return ()
    layout, place = plan.layout, plan.layout.expert_coord(at)
    held = expert_range(plan.spec.moe.num_experts, layout.ep, place.ep)
    return (f"{held[0]}-{held[-1]}" + (f" (slice {place.etp + 1} of {layout.etp})" if layout.etp > 1 else ""),)


def _engine_rows(plan: Plan) -> Rows:
    engines = plan.placement.engines
    weights = f"{_size(max(engine_weights(plan, worker) for worker in {0, plan.sync.engine_layout.world - 1}))}"
    rows = [(str(index), _engine_sizes(plan.exp.rollout), _devices(plan, devices), weights)
            for index, devices in enumerate(engines[:_MAX_ROWS])]
    return _capped(rows, len(engines))


def _batch_rows(plan: Plan) -> Rows:
    exp, batch = plan.exp, plan.exp.batch
    samples = batch.prompts_per_step * batch.samples_per_prompt
    per_minibatch = samples // batch.minibatches
    per_replica = ceil(per_minibatch / plan.layout.replicas)
    longest = exp.data.max_prompt_tokens + exp.rollout.sampling.max_response_tokens
    # A microbatch takes at least this many of the longest samples, and never fewer than one.
    at_once = max(1, batch.max_tokens_per_microbatch // longest)
    return [
        ("samples a step", f"{batch.prompts_per_step} prompts × {batch.samples_per_prompt} = {samples}"),
        *_drawing_rows(exp),
        ("optimizer steps a step", f"{batch.minibatches} minibatch(es) × {batch.epochs} epoch(s) = "
                                   f"{batch.minibatches * batch.epochs}"),
        ("samples a minibatch", f"{per_minibatch}, at most {per_replica} on each of {plan.layout.replicas} replica(s) "
                                "when all are equally long"),
        ("longest sample", f"{longest} tokens"),
        ("tokens a step", f"at most {samples * longest:,}"),
        ("microbatches", f"at most {ceil(per_replica / at_once)} a minibatch and replica, of "
                         f"{batch.max_tokens_per_microbatch} tokens"),
    ]


def _drawing_rows(exp: Experiment) -> Rows:
    """How many prompts a step may draw, where filters leave groups out."""
    rollout, prompts = exp.rollout, exp.batch.prompts_per_step
    if not rollout.filters.active:
        return []
    return [("prompts drawn a step", f"{prompts + rollout.oversample} from the start, at most "
                                     f"{prompts * rollout.dynamic_sampling.max_gen_batches}")]


def _memory_rows(plan: Plan) -> Rows:
    rows = []
    for rank in range(min(plan.layout.world, _MAX_ROWS)):
        memory = rank_memory(plan, rank)
        rows.append((str(rank), *map(_size, (memory.weights, memory.gradients, memory.optimizer, memory.sync,
                                             memory.total))))
    return _capped(rows, plan.layout.world)


def turn_memory(plan: Plan) -> dict[str, tuple[int, int]]:
    """By turn, the bytes of the rank that needs most and of an engine's worker, whose cache is not counted."""
    rank = max(range(min(plan.layout.world, _MAX_ROWS)), key=lambda rank: rank_memory(plan, rank).total)
    whole, policy = rank_memory(plan, rank), rank_memory(replace(plan, critic=None), rank)
    ring = receive_buffers(plan.exp) * plan.sync.max_bucket_bytes
    worker = ring + max(engine_weights(plan, worker) for worker in {0, plan.sync.engine_layout.world - 1})
    offloads, sleeps = plan.exp.trainers_offload(plan.device), plan.exp.engines_sleep(plan.device)
    return {"train": (whole.total, ring if sleeps else worker),
            "push": (policy.weights + policy.sync if offloads else whole.total, worker),
            "generate": (policy.sync if offloads else whole.total, worker)}


def _turn_rows(plan: Plan) -> Rows:
    turns, sleeps = turn_memory(plan), plan.exp.engines_sleep(plan.device)
    cached = ("generate",) if sleeps else tuple(turns)
    rows = [(turn, _size(rank), _size(worker) + (" + cache" if turn in cached else ""), _size(rank + worker))
            for turn, (rank, worker) in turns.items()]
    return [*rows, ("peak", "", "", _size(max(map(sum, turns.values()))))]


def _sync_rows(plan: Plan) -> Rows:
    sync, cluster = plan.sync, plan.exp.cluster
    engines, sent, received = sync.engine_layout, sync.bytes_by_sender, sync.bytes_by_worker
    links = sorted({len(sync.senders(engine)) for engine in range(engines.count)})
    predicted = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in sync.predictions.items())
    return [
        ("strategy", f"{sync.strategy} ({plan.exp.sync.strategy}); predicted: {predicted}"),
        ("links", f"{engines.count}: {'-'.join(map(str, {links[0]: 0, links[-1]: 0}))} sender(s) to each engine's "
                  f"{engines.world} worker(s)"),
        ("model", f"{len(hf_tensors(plan.spec))} tensors, {_size(sync.total_bytes)}"),
        *([("fp8", _quantised(sync))] if sync.options.fp8 else []),
        ("buckets", f"{len(sync.outline)} of at most {plan.exp.sync.bucket_mb:g} MiB, the largest "
                    f"{_size(sync.max_bucket_bytes)}"),
        ("bytes sent", f"{_size(sum(sent.values()))} by {len(sent)} of {plan.layout.world} rank(s), the busiest "
                       f"{_size(max(sent.values()))}"),
        *([("kept for sync.delta", f"what a rank sends, on the busiest {_size(_busiest_kept(sync))}")]
          if plan.exp.sync.delta else []),
        ("bytes an engine worker receives", _size(max(received))),
        ("receive buffers a worker", f"{receive_buffers(plan.exp)} × {_size(sync.max_bucket_bytes)}"),
        ("lower bound", f"{sync.lower_bound_s:.3g} s with {cluster.nic_gb_s:g} GB/s a GPU between machines and "
                        f"{cluster.nvlink_gb_s:g} GB/s inside"),
        ("transport", plan.exp.sync.transport),
    ]


def _quantised(sync: SyncPlan) -> str:
    """What leaves in fp8, and of it what would go from shard to shard if that did not cut through blocks."""
    groups = [(number, group) for number, group in enumerate(sync.schedule.groups) if group.fp8]
    count = sum(len(entry.rule.hf) for _, group in groups for entry in group.entries)
    buckets = sum(bucket.dtype == BYTES for bucket in sync.outline)
    words = (f"{count} tensors, {_size(sum(sync.contents.sent(number) for number, _ in groups))} with their scales, in "
             f"{buckets} buckets; the others in {sync.options.dtype}")
    if sync.strategy == "sharded" and (names := [*sync.contents.crossing()]):
        kinds = ", ".join(dict.fromkeys(name.split(".")[-2] for name in names))
        words += f"; {len(names)} travel whole, as shards would cut through blocks: {kinds}"
    return words


def _busiest_kept(sync: SyncPlan) -> int:
    """Bytes of all slices of the rank that sends most; a slice counts once, to however many engines it goes."""
    kept: Counter[int] = Counter()
    for bucket in sync.outline:
        for one in bucket.slices:
            kept[one.sender] += one.nbytes
    return max(kept.values())


def _size(count: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"
