"""Times weight syncs from a trainer to one vLLM engine, and beside them a raw NCCL broadcast of the same bytes.

    torchrun --nproc-per-node TP tools/bench_sync.py --python VLLM_PYTHON [--shape qwen2.5-7b] [--rounds 5] ...

The ranks are a tensor-parallel gang with random weights (no Megatron is built: only what a sync reads), on the first
GPUs; the engine takes the next ones. A push is timed whole, from the status call to the engine's commit. The first one
builds the link and verifies checksums; with --verify-last so does the last. Needs TP + engine TP GPUs.
"""
from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from math import prod
from pathlib import Path
from statistics import median

import ray
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mrl.cluster.fleet import connect_ray
from mrl.config.schema import Experiment
from mrl.engine.api import Version
from mrl.engine.server import EngineServer
from mrl.reshard.layout import Layout
from mrl.reshard.params import hf_tensors, local_params
from mrl.reshard.spec import model_spec, read_config
from mrl.stream.sync import WeightSync

sys.path.insert(0, str(Path(__file__).parent))
from make_quickstart import make_tokenizer  # noqa: E402

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
RAW_MIB = 1024
RUN_ID = "bench-sync"


class RandomWeights:
    """What WeightSync needs of a trainer: one rank's shards, in bfloat16 on its GPU."""

    def __init__(self, path: Path, layout: Layout, rank: int, device: torch.device, te: bool):
        self.layout, self.coord, self.te = layout, layout.coord(rank), te
        self.spec = model_spec(read_config(path))
        self.params = {}
        for plan in local_params(self.spec, layout, self.coord, te):
            self.params[plan.name] = torch.empty(plan.shape, dtype=torch.bfloat16, device=device)
        generator = torch.Generator(device).manual_seed(1)  # the same everywhere: replicated parameters must be equal
        for tensor in self.params.values():
            tensor.normal_(0, 0.02, generator=generator)
        self.total_bytes = sum(2 * prod(shape) for shape in hf_tensors(self.spec).values())

    def local_params(self) -> dict[str, torch.Tensor]:
        return self.params

    def change(self) -> None:
        """New values, so that every push brings something new."""
        for tensor in self.params.values():
            tensor.neg_()
        torch.cuda.synchronize()


def experiment(options: argparse.Namespace, path: Path, ranks: int) -> Experiment:
    return Experiment.model_validate({
        "name": RUN_ID,
        "model": {"path": str(path)},
        "data": {"train": "unused", "max_prompt_tokens": 512},
        "batch": {"prompts_per_step": 1, "samples_per_prompt": 2},
        "trainer": {"parallel": {"tp": ranks}},
        "rollout": {"python": options.python, "parallel": {"tp": options.engine_tp}, "max_concurrent_requests": 64,
                    "sampling": {"max_response_tokens": 512}, "start_timeout_s": options.start_timeout,
                    "args": ["--enforce-eager", "--gpu-memory-utilization", "0.6", *options.engine_arg]},
        "sync": {"strategy": options.strategy, "transport": options.transport,
                 "bucket_mb": options.bucket_mb[0], "buffers": options.buffers,
                 "verify_every": options.rounds if options.verify_last else 0},
        "loop": {"steps": 1},
        "cluster": {"device": "cuda", "trainer_gpus": ranks, "rollout_gpus": options.engine_tp},
    })


def raw_broadcast(rank: int, port: int, gpu: int, nbytes: int, seconds) -> None:
    """One of two processes: the bytes in messages of RAW_MIB over a process group of torch, nothing else around it."""
    torch.cuda.set_device(gpu)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2)
    flat = torch.empty(RAW_MIB << 20, dtype=torch.uint8, device=gpu)
    sizes = [flat.numel()] * (nbytes // flat.numel()) + [nbytes % flat.numel()]
    best = float("inf")
    for _ in range(4):
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for size in sizes:
            dist.broadcast(flat[:size], 0)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    seconds[rank] = best
    dist.destroy_process_group()


def time_raw(ranks: int, nbytes: int) -> float:
    """Seconds of a raw broadcast between the first trainer's GPU and the first engine's."""
    context = mp.get_context("spawn")
    port = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port  # closed again: a free port
    seconds = context.Array("d", 2)
    peers = [context.Process(target=raw_broadcast, args=(r, port, gpu, nbytes, seconds))
             for r, gpu in enumerate((0, ranks))]
    for peer in peers:
        peer.start()
    for peer in peers:
        peer.join(120)
    return max(seconds)


def show(name: str, report, raw_s: float) -> None:
    size = report.bytes / 1e9
    print(f"{name}: {report.seconds:.3f} s = {size / report.seconds:.0f} GB/s ({raw_s / report.seconds:.0%} of raw); "
          f"gather {report.gather_s:.3f} send {report.send_s:.3f} load {report.load_s:.3f} s"
          + (", verified" if report.verified else ""), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="Python of an environment with vLLM")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-7b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket-mb", type=float, nargs="+", default=[512], help="sync.bucket_mb, one after another")
    parser.add_argument("--buffers", type=int, default=2)
    parser.add_argument("--strategy", choices=("auto", "broadcast", "multi_sender", "sharded"), default="auto")
    parser.add_argument("--transport", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--engine-tp", type=int, default=1)
    parser.add_argument("--engine-arg", action="append", default=[], help="extra argument of the engine (repeat)")
    parser.add_argument("--start-timeout", type=float, default=600)
    parser.add_argument("--verify-last", action="store_true", help="compare checksums after the last round too")
    parser.add_argument("--out", type=Path, help="also write the figures there, as JSON")
    options = parser.parse_args()

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    with tempfile.TemporaryDirectory() as folder:
        bench(options, Path(folder))
    dist.destroy_process_group()


def bench(options: argparse.Namespace, folder: Path) -> None:
    """Start an engine and push to it; `folder` is for the model's config and the engine's log."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    (folder / "config.json").write_text(json.dumps(SHAPES[options.shape]))
    make_tokenizer().save_pretrained(folder)
    exp = experiment(options, folder, ranks)
    trainer = RandomWeights(folder, Layout(tp=ranks), rank, torch.device("cuda", torch.cuda.current_device()), te=True)
    engines, raw_s, results = None, 0.0, {}
    try:
        if rank == 0:
            raw_s, began = time_raw(ranks, trainer.total_bytes), time.monotonic()
            size = trainer.total_bytes / 1e9
            print(f"raw NCCL broadcast of {size:.2f} GB: {raw_s:.4f} s = {size / raw_s:.0f} GB/s", flush=True)
            connect_ray("local", RUN_ID)
            gpus = [str(gpu) for gpu in range(ranks, ranks + options.engine_tp)]
            engines = [ray.remote(num_cpus=0, max_concurrency=100)(EngineServer).remote(exp, 0, RUN_ID, folder, gpus)]
            ray.get(engines[0].start.remote())
            print(f"engine up after {time.monotonic() - began:.0f} s", flush=True)
        dist.barrier()
        for attempt, bucket_mb in enumerate(options.bucket_mb):
            settings = exp.sync.model_copy(update={"bucket_mb": bucket_mb})
            sync = WeightSync(exp.model_copy(update={"sync": settings}), trainer, engines, RUN_ID)
            seconds = push_rounds(sync, trainer, attempt, options.rounds, raw_s)
            results[f"{bucket_mb:g} MiB"] = seconds
            sync.close()
    finally:
        if engines:
            ray.get(engines[0].stop.remote())
            ray.shutdown()
    if rank == 0 and options.out:
        options.out.write_text(json.dumps({"shape": options.shape, "raw_s": raw_s, "push_s": results}))


def push_rounds(sync: WeightSync, trainer: RandomWeights, attempt: int, rounds: int, raw_s: float) -> list[float]:
    """One push that builds the link, then the timed ones, whose seconds are returned; on rank 0 each is printed."""
    name = f"{sync.settings.bucket_mb:g} MiB x {sync.settings.buffers}"
    plain = []
    for step in range(1 + rounds):
        trainer.change()
        report = sync.push(Version(attempt, 1 + step))
        if not report.ok:
            raise SystemExit(f"push {step} failed: {report.errors}")
        if not report.verified:
            plain.append(report.seconds)
        if sync.rank == 0:
            show(f"{name}, {report.strategy}, {len(sync.plan.outline)} buckets, push {step}", report, raw_s)
    if sync.rank == 0:
        print(f"{name}: median of {len(plain)} pushes {median(plain):.3f} s = "
              f"{trainer.total_bytes / 1e9 / median(plain):.0f} GB/s, {raw_s / median(plain):.0%} of raw", flush=True)
    return plain


if __name__ == "__main__":
    main()
