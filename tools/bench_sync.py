"""Times weight syncs from a trainer to one engine, and beside them, in the same run, what others do.

    torchrun --nproc-per-node TP tools/bench_sync.py --python ENGINE_PYTHON --model DIR [--strategy all] …

The ranks are a tensor-parallel gang with random weights (no Megatron is built: only what a sync reads). With GPUs the
ranks have the first ones and the engine the next; with cuda_ipc both have the same, and mrl alone is timed. A push is
timed whole, from the status call to the engine's commit; the first one, which builds the link and verifies checksums,
is not counted. All ways take turns, round by round, so that what else the machine does disturbs all of them alike.
Beside mrl's:

    raw broadcast          the same bytes in messages of 1 GiB at most, into processes that do nothing else
    per tensor             vLLM: every HF tensor by itself: a call of the engine, a broadcast, a call of its loader
    per tensor, one call   vLLM: the same, but the engine is called once for all of them
    vLLM nccl, nccl_m2n    on GPUs: vLLM's own weight transfer, from its own trainer's side (--vllm-transfer)
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Callable, Mapping, Optional, Sequence

import ray
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from mrl.cluster.fleet import connect_ray
from mrl.config.schema import Experiment
from mrl.engine.api import Version
from mrl.engine.ports import reserve_port
from mrl.engine.server import EngineServer
from mrl.reshard.layout import Layout
from mrl.reshard.params import hf_tensors, local_params
from mrl.reshard.spec import model_spec, read_config
from mrl.stream.sync import WeightSync

TOOLS = Path(__file__).resolve().parent
sys.path.insert(0, str(TOOLS))
from make_quickstart import make_tokenizer  # noqa: E402
from peers.trainer import HOST, PerTensor, RawBroadcast  # noqa: E402

_QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "attention_dropout": 0.0,
          "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
          "rope_theta": 1e6, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_sliding_window": False,
          "num_hidden_layers": 28}
SHAPES = {
    "qwen2.5-7b": {**_QWEN2, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
                   "num_key_value_heads": 4, "vocab_size": 152064},
    "qwen2.5-1.5b": {**_QWEN2, "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12,
                     "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
}
RUN_ID = "bench-sync"
STRATEGIES = ("broadcast", "multi_sender", "sharded")
BF16_BYTES = 2


@dataclass
class Figure:
    """One line of the result: seconds of every round, and of its stages where they are known."""

    name: str
    seconds: list[float] = field(default_factory=list)
    stages: list[dict[str, float]] = field(default_factory=list)

    def add(self, turn: int, seconds: float, stages: Optional[dict[str, float]] = None) -> None:
        """Note a round; that of turn 0 is not counted."""
        if turn:
            self.seconds.append(seconds)
            self.stages.append(stages or {})

    def stage(self, name: str) -> str:
        """The median of a stage, as text; empty where it is not known."""
        known = [stages[name] for stages in self.stages if name in stages]
        return f"{median(known):.3f}" if known else ""


class RandomWeights:
    """What WeightSync needs of a trainer: one rank's shards, in bfloat16 on its device."""

    def __init__(self, path: Path, layout: Layout, rank: int, device: torch.device):
        self.layout, self.coord, self.te = layout, layout.coord(rank), device.type == "cuda"
        self.spec = model_spec(read_config(path))
        self.params = {plan.name: torch.empty(plan.shape, dtype=torch.bfloat16, device=device)
                       for plan in local_params(self.spec, layout, self.coord, self.te)}
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
    """Whether trainer and engine share GPUs, as only CUDA IPC can serve; NCCL refuses two ranks on one."""
    return options.transport == "cuda_ipc"


def experiment(options: argparse.Namespace, path: Path, ranks: int, port: int) -> Experiment:
    arguments = list(options.engine_arg)
    if options.engine == "vllm":
        arguments += ["--worker-extension-cls", "peers.worker.PeerReceiver"]
        if options.device == "cuda":
            arguments += ["--enforce-eager", "--gpu-memory-utilization", "0.6"]
        if options.vllm_transfer:
            arguments += ["--weight-transfer-config", json.dumps({"backend": options.vllm_transfer})]
    return Experiment.model_validate({
        "name": RUN_ID,
        "model": {"path": str(path)},
        "data": {"train": "unused", "max_prompt_tokens": 64},
        "batch": {"prompts_per_step": 1, "samples_per_prompt": 2},
        "trainer": {"parallel": {"tp": ranks}},
        "rollout": {"engine": options.engine, "python": options.python, "parallel": {"tp": options.engine_tp},
                    "host": HOST, "port": port, "max_concurrent_requests": 16, "args": arguments,
                    "env": {"PYTHONPATH": str(TOOLS)}, "sampling": {"max_response_tokens": 64},
                    "start_timeout_s": options.start_timeout},
        "sync": {"buffers": options.buffers, "transport": options.transport, "verify_every": int(options.verify)},
        "loop": {"steps": 1, "mode": "colocated_sync" if colocated(options) else "one_step_overlap"},
        "cluster": {"device": options.device, **({"gpus": ranks} if colocated(options) else {
            "trainer_gpus": ranks, "rollout_gpus": options.engine_tp})},
    })


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="Python of an environment with the engine")
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--model", type=Path, help="a Hugging Face model directory; its weights are not read")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-7b", help="a model's sizes, without --model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--strategy", choices=(*STRATEGIES, "auto", "all"), default="auto", help="sync.strategy")
    parser.add_argument("--rounds", type=int, default=3, help="of which the median counts")
    parser.add_argument("--bucket-mb", type=float, nargs="+", default=[512], help="sync.bucket_mb, one after another")
    parser.add_argument("--buffers", type=int, default=2)
    parser.add_argument("--transport", choices=("auto", "nccl", "gloo", "cuda_ipc"), default="auto")
    parser.add_argument("--engine-tp", type=int, default=1)
    parser.add_argument("--engine-arg", action="append", default=[], help="extra argument of the engine (repeat)")
    parser.add_argument("--verify", action="store_true", help="compare checksums in every push")
    parser.add_argument("--vllm-transfer", choices=("nccl", "nccl_m2n"), help="also time vLLM's own; GPUs only")
    parser.add_argument("--start-timeout", type=float, default=600)
    parser.add_argument("--out", type=Path, help="also write the figures there, as JSON")
    options = parser.parse_args()
    if options.vllm_transfer and ((options.engine, options.device) != ("vllm", "cuda") or colocated(options)):
        parser.error("--vllm-transfer needs --engine vllm and GPUs of its own")
    if colocated(options) and options.strategy not in ("auto", "multi_sender"):
        parser.error("--transport cuda_ipc has one strategy: --strategy multi_sender")

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
    nbytes = BF16_BYTES * sum(torch.Size(shape).numel() for shape in hf_tensors(trainer.spec).values())
    with reserve_port(HOST, 0, "rollout.port") as port:
        exp = experiment(options, model, ranks, port)
    settings = [(strategy, size) for strategy in (STRATEGIES if options.strategy == "all" else (options.strategy,))
                for size in options.bucket_mb]
    engines, others, figures = None, {}, {}
    try:
        if rank == 0:
            first = 0 if colocated(options) else ranks
            gpus = range(first, first + options.engine_tp) if options.device == "cuda" else ()
            connect_ray("local", RUN_ID)
            engines = [ray.remote(num_cpus=0, max_concurrency=100)(EngineServer).remote(
                exp, 0, RUN_ID, folder, [str(gpu) for gpu in gpus])]
            ray.get(engines[0].start.remote())
            if not colocated(options):
                receivers = [torch.device("cuda", gpu) for gpu in gpus] or [device] * options.engine_tp
                rounds = len(settings) * (1 + options.rounds)
                others["raw broadcast"] = RawBroadcast(nbytes, device, receivers, rounds).push
            if options.engine == "vllm" and not colocated(options):
                peer = PerTensor(f"http://{HOST}:{port}", hf_tensors(trainer.spec), device, options.engine_tp)
                others |= {"per tensor": peer.push, "per tensor, one call": peer.push_in_one_call}
        dist.barrier()
        figures = measure(options, exp, settings, trainer, engines, others)
        if rank == 0 and options.vllm_transfer:
            figures.append(vllm_transfer(options, folder, port, hf_tensors(trainer.spec)))
    finally:
        if engines:
            ray.get(engines[0].stop.remote())
            ray.shutdown()
    if rank == 0:
        show(figures, nbytes)
        if options.out:
            options.out.write_text(json.dumps({"bytes": nbytes, "figures": [asdict(one) for one in figures]}))


def measure(options: argparse.Namespace, exp: Experiment, settings: Sequence[tuple[str, float]],
            trainer: RandomWeights, engines: Optional[list], others: Mapping[str, Callable[[], float]]) -> list[Figure]:
    """mrl with all (strategy, bucket_mb) of `settings`, and the `others`, in turn."""
    figures = {name: Figure(name) for name in others}
    for attempt, (strategy, size) in enumerate(settings):
        chosen = exp.sync.model_copy(update={"strategy": strategy, "bucket_mb": size})
        sync = WeightSync(exp.model_copy(update={"sync": chosen}), trainer, engines, RUN_ID)
        mine = Figure(f"mrl {sync.plan.strategy}, {size:g} MiB x {options.buffers}")
        for turn in range(1 + options.rounds):  # the first connects, and is not counted
            for name, push in others.items():
                figures[name].add(turn, push())
            dist.barrier()
            trainer.change()
            report = sync.push(Version(attempt, 1 + turn))
            if not report.ok:
                raise SystemExit(f"push {turn} failed: {report.errors or report.absent}")
            mine.add(turn, report.seconds, {"gather": report.gather_s, "send": report.send_s, "load": report.load_s})
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


def shape_only(folder: Path, shape: str) -> Path:
    """A model directory with a config and a tokenizer, and no weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    make_tokenizer().save_pretrained(folder)
    return folder


def show(figures: list[Figure], nbytes: int) -> None:
    """One row a way to sync, beside the first of them: the raw broadcast, where it was timed."""
    table = Table(title=f"{nbytes / 1e9:.3f} GB, medians")
    for heading in ("way", "seconds", "GB/s", "x first", "gather", "send", "load", "slowest"):
        table.add_column(heading, justify="left" if heading == "way" else "right", no_wrap=True)
    first = median(figures[0].seconds)
    for figure in figures:
        middle = median(figure.seconds)
        table.add_row(figure.name, f"{middle:.3f}", f"{nbytes / 1e9 / middle:.2f}", f"{middle / first:.2f}",
                      *(figure.stage(name) for name in ("gather", "send", "load")), f"{max(figure.seconds):.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
