"""Times weight syncs from a trainer to one engine, and beside them, in the same run, what others do.

    torchrun --nproc-per-node TP tools/bench_sync.py --python ENGINE_PYTHON --shape qwen2.5-7b [--strategy all] …
    torchrun --nproc-per-node 1 tools/bench_sync.py --python ENGINE_PYTHON --transport cuda_ipc --verify off on …

The ranks are a tensor-parallel gang with random weights (no Megatron is built: only what a sync reads). With GPUs the
ranks have the first ones and the engine the next; with --colocated (which cuda_ipc implies) both have the same. A push
is timed whole, from the call of the engine to its commit; the first one, which builds the link and verifies
checksums, is not counted. Of it, "transfer" is what the engine's worker needs from when it begins to receive to the
last byte in place; the rest are calls between processes ("control") that do not run beside it. All ways take turns,
round by round, so that what else the machine does disturbs all of them alike. Beside mrl's:

    raw broadcast          the same bytes in messages of 1 GiB at most, into processes that do nothing else
    device copy            colocated, instead of it: the same bytes copied in the memory of the trainer's device
    per tensor             vLLM: every HF tensor by itself: a call of the engine, a broadcast, a call of its loader
    per tensor, one call   vLLM: the same, but the engine is called once for all of them
    vLLM nccl, nccl_m2n    on GPUs: vLLM's own weight transfer, from its own trainer's side (--vllm-transfer)

A model of 61 GB fits twice on a GPU of 141 GB: --transport cuda_ipc --shape qwen3-30b-a3b, with --engine-memory 0.53
for vLLM and 0.85 for SGLang.
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from statistics import median
from typing import Callable, Mapping, NamedTuple, Optional, Sequence

import torch
import torch.distributed as dist

TOOLS = Path(__file__).resolve().parent
sys.path.insert(0, str(TOOLS.parent))
from mrl.config.schema import Experiment  # noqa: E402
from mrl.engine.api import Version  # noqa: E402
from mrl.engine.ports import reserve_port  # noqa: E402
from mrl.reshard.layout import Layout  # noqa: E402
from mrl.reshard.params import hf_tensors, local_params  # noqa: E402
from mrl.reshard.spec import model_spec, read_config  # noqa: E402
from mrl.stream.sync import WeightSync  # noqa: E402
from tools import one_engine  # noqa: E402
from tools.measure import Record, Row, hand_over  # noqa: E402
from tools.peers.trainer import HOST, DeviceCopy, PerTensor, RawBroadcast  # noqa: E402
from tools.workload import SHAPES, shape_only  # noqa: E402

RUN_ID = "bench-sync"
STRATEGIES = ("broadcast", "multi_sender", "sharded")
BF16_BYTES = 2
ALIGNED = 64
"""Elements of which the beginning of a parameter in Megatron's buffer is a multiple."""


@dataclass
class Figure:
    """One way to sync: seconds of every round, and of its stages where they are known."""

    name: str
    seconds: list[float] = field(default_factory=list)
    stages: list[dict[str, float]] = field(default_factory=list)

    def add(self, turn: int, seconds: float, stages: Optional[dict[str, float]] = None) -> None:
        """Note a round; that of turn 0 is not counted."""
        if turn:
            self.seconds.append(seconds)
            self.stages.append(stages or {})

    def stage_medians(self) -> dict[str, float]:
        """By stage; empty where they are not known."""
        names = self.stages[0] if self.stages else ()
        return {name: median(stages[name] for stages in self.stages) for name in names}


class Setting(NamedTuple):
    """What of mrl's settings varies within a run."""

    strategy: str
    bucket_mb: float
    verify: bool


class RandomWeights:
    """What WeightSync needs of a trainer: one rank's shards, in bfloat16 on its device, all in one buffer as Megatron
    has them."""

    def __init__(self, path: Path, layout: Layout, rank: int, device: torch.device):
        self.layout, self.coord, self.te = layout, layout.coord(rank), device.type == "cuda"
        self.spec = model_spec(read_config(path))
        plans = local_params(self.spec, layout, self.coord, self.te)
        sizes = [-(-prod(plan.shape) // ALIGNED) * ALIGNED for plan in plans]
        places = torch.empty(sum(sizes), dtype=torch.bfloat16, device=device).split(sizes)
        self.params = {plan.name: place[:prod(plan.shape)].view(plan.shape) for plan, place in zip(plans, places)}
        generator = torch.Generator(device).manual_seed(1)  # the same everywhere: replicated parameters must be equal
        for tensor in self.params.values():
            tensor.normal_(0, 0.02, generator=generator)

    def local_params(self) -> dict[str, torch.Tensor]:
        return self.params

    def change(self) -> None:
        """New values, so that every push brings something new."""
        for tensor in self.params.values():
            tensor.neg_()
        if self.te:
            torch.cuda.synchronize()


def colocated(options: argparse.Namespace) -> bool:
    """Whether trainer and engine share GPUs, as CUDA IPC needs it; NCCL refuses two ranks on one."""
    return options.colocated or options.transport == "cuda_ipc"


def engine_arguments(options: argparse.Namespace) -> list[str]:
    """Extra arguments of the engine."""
    arguments = one_engine.arguments(options, graphs=False)
    if options.engine == "vllm" and not colocated(options):
        arguments += ["--worker-extension-cls", "peers.worker.PeerReceiver"]
    if options.vllm_transfer:
        arguments += ["--weight-transfer-config", json.dumps({"backend": options.vllm_transfer})]
    return arguments


def experiment(options: argparse.Namespace, path: Path, ranks: int, port: int) -> Experiment:
    return Experiment.model_validate({
        "name": RUN_ID,
        "model": {"path": str(path)},
        "data": {"train": "unused", "max_prompt_tokens": 64},
        "batch": {"prompts_per_step": 1, "samples_per_prompt": 2},
        "trainer": {"parallel": {"tp": ranks}},
        "rollout": {"engine": options.engine, "python": options.python, "parallel": {"tp": options.engine_tp},
                    "host": HOST, "port": port, "max_concurrent_requests": 16, "args": engine_arguments(options),
                    "env": {} if colocated(options) else {"PYTHONPATH": str(TOOLS)},
                    "sampling": {"max_response_tokens": 64}, "start_timeout_s": options.start_timeout},
        "sync": {"buffers": options.buffers, "transport": options.transport},
        "loop": {"steps": 1, "mode": "colocated_sync" if colocated(options) else "one_step_overlap",
                 "sleep_engines": False},
        "cluster": {"device": options.device, **({"gpus": ranks} if colocated(options) else {
            "trainer_gpus": ranks, "rollout_gpus": options.engine_tp})},
    })


def parse(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    one_engine.add_options(parser)
    parser.add_argument("--model", type=Path, help="a Hugging Face model directory; its weights are not read")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-7b", help="a model's sizes, without --model")
    parser.add_argument("--strategy", choices=(*STRATEGIES, "auto", "all"), default="auto", help="sync.strategy")
    parser.add_argument("--rounds", type=int, default=3, help="of which the median counts")
    parser.add_argument("--bucket-mb", type=float, nargs="+", default=[512], help="sync.bucket_mb, one after another")
    parser.add_argument("--buffers", type=int, default=2)
    parser.add_argument("--transport", choices=("auto", "nccl", "gloo", "cuda_ipc"), default="auto")
    parser.add_argument("--colocated", action="store_true", help="trainer and engine on the same GPUs")
    parser.add_argument("--verify", choices=("off", "on"), nargs="+", default=["off"],
                        help="compare checksums in every push, or not, one after another")
    parser.add_argument("--vllm-transfer", choices=("nccl", "nccl_m2n"), help="also time vLLM's own; GPUs only")
    parser.add_argument("--json", type=Path, help="append the figures there, as one line of JSON")
    options = parser.parse_args(argv)
    if options.vllm_transfer and ((options.engine, options.device) != ("vllm", "cuda") or colocated(options)):
        parser.error("--vllm-transfer needs --engine vllm and GPUs of its own")
    if options.transport == "cuda_ipc" and options.strategy not in ("auto", "multi_sender"):
        parser.error("--transport cuda_ipc has one strategy: --strategy multi_sender")
    return options


def main() -> None:
    options = parse()
    if options.device == "cuda":
        if options.engine == "sglang":
            os.environ["NCCL_CUMEM_ENABLE"] = "0"  # as SGLang has it: NCCL wants the same at both ends
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    with tempfile.TemporaryDirectory() as folder:
        bench(options, Path(folder))
    dist.destroy_process_group()


def bench(options: argparse.Namespace, folder: Path) -> None:
    """Start an engine and measure; `folder` is for the model's config, where none is given, and the engine's log."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = options.model or shape_only(folder / "model", options.shape)
    device = torch.device("cuda", torch.cuda.current_device()) if options.device == "cuda" else torch.device("cpu")
    trainer = RandomWeights(model, Layout(tp=ranks), rank, device)
    shapes = hf_tensors(trainer.spec)
    nbytes = BF16_BYTES * sum(torch.Size(shape).numel() for shape in shapes.values())
    with reserve_port(HOST, 0, "rollout.port") as port:
        exp = experiment(options, model, ranks, port)
    strategies = STRATEGIES if options.strategy == "all" else (options.strategy,)
    settings = [Setting(strategy, size, verify == "on")
                for strategy, size, verify in product(strategies, options.bucket_mb, options.verify)]
    with ExitStack() as stack:
        engines, others = None, {}
        if rank == 0:
            first = 0 if colocated(options) else ranks
            engines = [stack.enter_context(one_engine.running(exp, folder, first))]
            receivers = [device] * options.engine_tp
            if options.device == "cuda":
                receivers = [torch.device("cuda", first + index) for index in range(options.engine_tp)]
            others = other_ways(options, nbytes, shapes, device, receivers, len(settings) * (1 + options.rounds), port)
        dist.barrier()
        figures = measure(options, exp, settings, trainer, engines, others)
        if rank == 0 and options.vllm_transfer:
            figures.append(vllm_transfer(options, folder, port, shapes))
    if rank == 0:
        about = (f"{options.model or options.shape}, {nbytes / 1e9:.3f} GB, {len(shapes)} tensors; {ranks} ranks to "
                 f"{options.engine} on {options.engine_tp} {'of the same' if colocated(options) else 'other'} "
                 f"{options.device} devices, medians of {options.rounds}")
        hand_over(Record("bench_sync", about, rows(figures, nbytes)), options.json)


def other_ways(options: argparse.Namespace, nbytes: int, shapes: Mapping[str, Sequence[int]], device: torch.device,
               receivers: Sequence[torch.device], rounds: int, port: int) -> dict[str, Callable[[], float]]:
    """What mrl takes turns with; the first is what all ways are compared with. For rank 0."""
    if colocated(options):
        return {"device copy": DeviceCopy(nbytes, device).push}
    ways = {"raw broadcast": RawBroadcast(nbytes, device, receivers, rounds).push}
    if options.engine == "vllm":
        peer = PerTensor(f"http://{HOST}:{port}", shapes, device, options.engine_tp)
        ways |= {"per tensor": peer.push, "per tensor, one call": peer.push_in_one_call}
    return ways


def measure(options: argparse.Namespace, exp: Experiment, settings: Sequence[Setting], trainer: RandomWeights,
            engines: Optional[list], others: Mapping[str, Callable[[], float]]) -> list[Figure]:
    """mrl with all `settings`, and the `others`, in turn."""
    figures = {name: Figure(name) for name in others}
    for attempt, setting in enumerate(settings):
        chosen = exp.sync.model_copy(update={"strategy": setting.strategy, "bucket_mb": setting.bucket_mb,
                                             "verify_every": int(setting.verify)})
        sync = WeightSync(exp.model_copy(update={"sync": chosen}), trainer, engines, RUN_ID)
        mine = Figure(f"mrl {sync.plan.strategy}, {setting.bucket_mb:g} MiB x {options.buffers}"
                      f"{', verified' if setting.verify else ''}")
        for turn in range(1 + options.rounds):  # the first connects, and is not counted
            for name, push in others.items():
                figures[name].add(turn, push())
            dist.barrier()
            trainer.change()
            report = sync.push(Version(attempt, 1 + turn))
            if not report.ok:
                raise SystemExit(f"push {turn} failed: {report.errors or report.absent}")
            mine.add(turn, report.seconds, {
                "transfer": report.transfer_s, "control": report.seconds - report.transfer_s,
                "gather": report.gather_s, "send": report.send_s, "load": report.load_s})
        figures[str(attempt)] = mine
        sync.close()
    return list(figures.values())


def vllm_transfer(options: argparse.Namespace, folder: Path, port: int, shapes: Mapping[str, Sequence[int]]) -> Figure:
    """vLLM's own transfer, to the same engine, from a trainer in vLLM's Python on this rank's GPU."""
    request = folder / "request.json"
    request.write_text(json.dumps({"url": f"http://{HOST}:{port}", "backend": options.vllm_transfer,
                                   "workers": options.engine_tp, "rounds": options.rounds, "shapes": shapes}))
    torch.cuda.empty_cache()
    answer = subprocess.run([options.python, "-m", "peers.vllm_transfer", str(request)], cwd=TOOLS, check=True,
                            stdout=subprocess.PIPE, text=True)
    return Figure(f"vLLM {options.vllm_transfer}", json.loads(answer.stdout.splitlines()[-1]))


def rows(figures: Sequence[Figure], nbytes: int) -> list[Row]:
    """One row a way, and one for the transfer alone where it is known, each beside the first way."""
    first, found = figures[0], []
    base = median(first.seconds)
    for figure in figures:
        middle, stages = median(figure.seconds), figure.stage_medians()
        known = ", ".join(f"{name} {seconds:.4f}" for name, seconds in stages.items())
        found.append(Row(figure.name, middle, "s", middle / base, first.name,
                         f"{nbytes / 1e9 / middle:.1f} GB/s, slowest {max(figure.seconds):.4f}; {known}".strip("; ")))
        if stages:
            seconds = stages["transfer"]
            found.append(Row("  its transfer", seconds, "s", seconds / base, first.name,
                             f"{nbytes / 1e9 / seconds:.1f} GB/s"))
    return found


if __name__ == "__main__":
    main()
