"""Times a trainer's move to host memory and back, and beside it, in the same run, bare copies of the same bytes.

    torchrun --nproc-per-node N tools/bench_offload.py --shape qwen2.5-1.5b [--json FILE]

A model with random weights takes one optimizer step, so that its optimizer has a state; then, as in `colocated_sync`,
its weights and optimizer leave the device and come back. The bare copies go between one buffer on the device and one
in page-locked host memory, in pieces of 1 GiB. Every rank does this at the same time; the figures are rank 0's.
"""
from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Callable, Optional, Sequence

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from mrl.algorithm.loss import make_loss  # noqa: E402
from mrl.config.algorithm import Algorithm  # noqa: E402
from mrl.platform import Platform  # noqa: E402
from mrl.trainer.offload import CHUNK, Offload  # noqa: E402
from tools.bench_trainer import DENSE, experiment, make_samples, microbatches  # noqa: E402
from tools.gang import gang, shared_folder  # noqa: E402
from tools.measure import Record, Row, alternate, hand_over  # noqa: E402
from tools.workload import SHAPES, random_model  # noqa: E402

OUT, BACK, BARE_OUT, BARE_BACK = "offload", "onload", "bare copy to the host", "bare copy from the host"
SAMPLES, SAMPLE_TOKENS = 4, 256


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=DENSE, default="qwen2.5-1.5b")
    parser.add_argument("--rounds", type=int, default=5, help="of which the median counts")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", type=Path, help="append the figures there, as one line of JSON")
    options = parser.parse_args(argv)
    with gang(options.device) as platform:
        record = bench(options, platform)
        if dist.get_rank() == 0:
            hand_over(record, options.json)


def bench(options: argparse.Namespace, platform: Platform) -> Record:
    """Build the trainer, move it and copy beside it. Collective."""
    from mrl.trainer.trainer import Trainer

    with shared_folder() as folder:
        if dist.get_rank() == 0:
            random_model(folder / "model", options.shape, platform.device())
        dist.barrier()
        trainer = Trainer(experiment(folder / "model", 1), platform, total_steps=1)
    samples = make_samples([SAMPLE_TOKENS] * SAMPLES * dist.get_world_size(), SHAPES[options.shape]["vocab_size"])
    trainer.train(microbatches(samples, trainer, SAMPLES * SAMPLE_TOKENS), make_loss(Algorithm(), 0.0))
    offload = Offload(trainer, platform)
    moved = offload.release()
    offload.restore()
    device = torch.empty(min(moved, CHUNK), dtype=torch.uint8, device=platform.device())
    host = platform.host_buffer(device)

    def release() -> None:
        offload.release()
        platform.release_cache()

    ways: dict[str, Callable[[], object]] = {
        OUT: release, BACK: offload.restore, BARE_OUT: lambda: copy(device, host, moved),
        BARE_BACK: lambda: copy(host, device, moved)}
    seconds = alternate({name: timed(way, platform) for name, way in ways.items()}, options.rounds,
                        quiet=dist.get_rank() > 0)
    about = f"{options.shape}, {dist.get_world_size()} ranks, {moved / 1e9:.2f} GB a rank, medians of {options.rounds}"
    return Record("bench_offload", about, [
        Row(name, moved / 1e9 / value, "GB/s", seconds[to] / value, to, f"{value:.4f} s")
        for (name, value), to in zip(seconds.items(), 2 * (BARE_OUT, BARE_BACK))])


def copy(source: torch.Tensor, target: torch.Tensor, nbytes: int) -> None:
    """So many bytes, over and over into the same place."""
    for start in range(0, nbytes, len(source)):
        size = min(len(source), nbytes - start)
        target[:size].copy_(source[:size], non_blocking=True)


def timed(way: Callable[[], object], platform: Platform) -> Callable[[], float]:
    """A function that returns the seconds that all ranks' turn takes this one."""
    def run() -> float:
        platform.synchronize()
        dist.barrier()
        began = time.perf_counter()
        way()
        platform.synchronize()
        return time.perf_counter() - began

    return run


if __name__ == "__main__":
    main()
