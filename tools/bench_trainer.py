"""Times optimizer steps of mrl's trainer, and beside them, in the same run, of a bare megatron-core loop.

    torchrun --nproc-per-node N tools/bench_trainer.py --shape qwen2.5-1.5b [--json FILE]

Random weights, the same in both; samples with long-tailed lengths, packed into the same rows; the layers are those of
Transformer Engine where it is installed. Before anything is timed, both must give the batch the same mean log-prob.
mrl takes whole steps of `TrainedModel.train` with the loss of GRPO: it packs, brings over, computes log-probs and
entropy, and gathers metrics. The bare loop (tools/peers/megatron_loop.py) gets rows packed beforehand and Megatron's
own fused cross-entropy. A third way is mrl with the same samples, every one padded to the longest of the batch.

Tokens are the samples' own, never padding. MFU: 6 FLOP a token for every weight that a matrix product uses, and for
attention 6 x layers x heads x head size x the square of each sample's length, the causal half alone.
"""
from __future__ import annotations

import argparse
import gc
import sys
import time
from pathlib import Path
from typing import Callable, Optional, Sequence

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from mrl.algorithm.loss import make_loss  # noqa: E402
from mrl.config.algorithm import Algorithm  # noqa: E402
from mrl.config.schema import Experiment  # noqa: E402
from mrl.platform import Platform  # noqa: E402
from mrl.reshard.params import hf_tensors  # noqa: E402
from mrl.reshard.spec import ModelSpec  # noqa: E402
from mrl.trainer.microbatch import Sample, assign, pack  # noqa: E402
from tools.gang import gang, shared_folder  # noqa: E402
from tools.measure import Record, Row, alternate, hand_over  # noqa: E402
from tools.workload import SHAPES, long_tailed, random_model  # noqa: E402

DENSE = [name for name, config in SHAPES.items() if "num_experts" not in config]
MRL, BARE, PADDED = "mrl, packed", "bare megatron-core, packed", "mrl, padded to the longest"
SAME = 0.01
"""Relative difference allowed between the two mean log-probs in bfloat16."""


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=DENSE, default="qwen3-0.6b")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size, with sequence parallelism; "
                                                          "the other ranks are data-parallel")
    parser.add_argument("--samples", type=int, default=64, help="of one step")
    parser.add_argument("--median", type=int, default=512, help="tokens of a sample, prompt included")
    parser.add_argument("--sigma", type=float, default=0.8, help="of the lengths' logarithm")
    parser.add_argument("--longest", type=int, default=4096, help="lengths are cut there")
    parser.add_argument("--max-tokens", type=int, default=8192, help="batch.max_tokens_per_microbatch")
    parser.add_argument("--rounds", type=int, default=3, help="of which the median counts")
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps of one round")
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="of one device, for MFU: 989 is the H200's "
                                                                        "dense bfloat16")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", type=Path, help="append the figures there, as one line of JSON")
    options = parser.parse_args(argv)

    with gang(options.device) as platform:
        record = bench(options, platform)
        if dist.get_rank() == 0:
            hand_over(record, options.json)


def bench(options: argparse.Namespace, platform: Platform) -> Record:
    """Build both, compare them, time all ways. Collective."""
    from mrl.trainer.trainer import Trainer
    from tools.peers.megatron_loop import MegatronLoop

    hf = SHAPES[options.shape]
    memory = Memory(platform)
    with shared_folder() as folder:
        if dist.get_rank() == 0:
            random_model(folder / "model", options.shape, platform.device())
        dist.barrier()
        trainer = Trainer(experiment(folder / "model", options.tp), platform, total_steps=1_000_000)
    lengths = long_tailed(options.samples, options.median, options.sigma, options.longest)
    samples = make_samples(lengths, hf["vocab_size"])
    packed = microbatches(samples, trainer, options.max_tokens)
    padded = microbatches([pad(sample, max(lengths)) for sample in samples], trainer, options.max_tokens)
    loss = make_loss(Algorithm(), 0.0)
    trainer.train(packed, loss)  # makes the optimizer's state
    held = {MRL: memory.grown()}
    bare = MegatronLoop(hf, trainer.local_params(), platform, options.tp, lr=1e-6)
    rows = [pack(microbatch, max(2, options.tp)) for microbatch in packed]
    compare(trainer, bare, packed, rows)
    held |= {BARE: memory.grown(), PADDED: held[MRL]}

    ways = {MRL: lambda: trainer.train(packed, loss), BARE: lambda: bare.train(rows),
            PADDED: lambda: trainer.train(padded, loss)}
    peaks: dict[str, float] = {}
    seconds = alternate({name: timed(step, options.steps, memory, peaks, name) for name, step in ways.items()},
                        options.rounds, quiet=dist.get_rank() > 0)
    return Record("bench_trainer", setting(options, lengths, platform), figures(
        options, trainer.spec, lengths, {name: value / options.steps for name, value in seconds.items()}, held, peaks))


def experiment(model: Path, tp: int) -> Experiment:
    """What a trainer needs to know."""
    return Experiment.model_validate({
        "model": {"path": str(model), "dtype": "bfloat16"}, "data": {"train": "unused"},
        "batch": {"prompts_per_step": 1, "samples_per_prompt": 2},
        "trainer": {"parallel": {"tp": tp, "sequence_parallel": tp > 1}}, "rollout": {"python": "unused"},
        "loop": {"steps": 1}, "cluster": {}})


def make_samples(lengths: Sequence[int], vocab: int) -> list[Sample]:
    """Samples with the fields of GRPO's loss. Of each, all but the first quarter counts as sampled."""
    generator = torch.Generator().manual_seed(2)
    tokens = sum(length - length // 4 for length in lengths)
    samples = []
    for length in lengths:
        mask = torch.arange(length) >= length // 4
        share = torch.where(mask, 1 / tokens, 0.0)
        samples.append({"tokens": torch.randint(0, vocab, (length,), generator=generator), "loss_mask": mask,
                        "token_weight": share, "mean_weight": share,
                        "advantage": torch.randn((), generator=generator).repeat(length),
                        "rollout_log_prob": torch.zeros(length)})
    return samples


def pad(sample: Sample, longest: int) -> Sample:
    """The sample with tokens behind it, which do not count, up to `longest`: its row of a padded batch."""
    return {name: torch.cat([field, field.new_zeros(longest - len(field))]) for name, field in sample.items()}


def microbatches(samples: Sequence[Sample], trainer, max_tokens: int) -> list[list[Sample]]:
    """This replica's share of the samples, in microbatches under the token budget."""
    shares = assign([len(sample["tokens"]) for sample in samples], trainer.layout.replicas, max_tokens)
    return [[samples[index] for index in microbatch] for microbatch in shares[trainer.dp_rank]]


def compare(trainer, bare, packed: Sequence[Sequence[Sample]], rows: Sequence) -> None:
    """SystemExit unless both give this replica's samples the same mean log-prob. Takes one step of the bare loop."""
    log_probs = torch.cat([sample[1:] for sample in trainer.log_probs(packed)])
    mine, other = log_probs.mean().item(), -bare.train(rows)
    if not abs(mine - other) <= SAME * abs(mine):
        raise SystemExit(f"the mean log-prob is {mine:.5f} in mrl and {other:.5f} in the bare loop: no figures")


class Memory:
    """GB of a GPU that are held, and by how much a step exceeds them; on a CPU, where nobody counts, 0."""

    def __init__(self, platform: Platform):
        self.platform, self.before = platform, 0.0

    def now(self) -> float:
        gc.collect()
        return torch.cuda.memory_allocated() / 1e9 if self.platform.name == "cuda" else 0.0

    def grown(self) -> float:
        """Since the last call."""
        before, self.before = self.before, self.now()
        return self.before - before

    def reset(self) -> float:
        """Forget the peak. Returns what is held now."""
        if self.platform.name == "cuda":
            torch.cuda.reset_peak_memory_stats()
        return self.now()

    def peak(self) -> float:
        return torch.cuda.max_memory_allocated() / 1e9 if self.platform.name == "cuda" else 0.0


def timed(step: Callable, steps: int, memory: Memory, peaks: dict[str, float], name: str) -> Callable[[], float]:
    """A function that takes `steps` steps, returns the seconds, and notes in `peaks` the GB beyond those held."""
    def run() -> float:
        before = memory.reset()
        dist.barrier()
        memory.platform.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            step()
        memory.platform.synchronize()
        dist.barrier()
        seconds = time.perf_counter() - began
        peaks[name] = memory.peak() - before
        return seconds

    return run


def flops(spec: ModelSpec, lengths: Sequence[int]) -> float:
    """Of one optimizer step on a dense model; a product of matrices for which 2 FLOP a multiplication are counted,
    forward once and backward twice."""
    weights = sum(torch.Size(shape).numel() for name, shape in hf_tensors(spec).items()
                  if len(shape) == 2 and (spec.tied or "embed_tokens" not in name))
    attention = 6 * spec.num_layers * spec.heads * spec.head_dim * sum(length ** 2 for length in lengths)
    return 6.0 * weights * sum(lengths) + attention


def figures(options: argparse.Namespace, spec: ModelSpec, lengths: Sequence[int], seconds: dict[str, float],
            held: dict[str, float], peaks: dict[str, float]) -> list[Row]:
    """`seconds` of one step, by way."""
    tokens, work = sum(lengths), flops(spec, lengths) / (options.peak_tflops * 1e12 * dist.get_world_size())
    compared = {MRL: (BARE, seconds[BARE] / seconds[MRL]), BARE: (BARE, 1.0),
                PADDED: (MRL, seconds[MRL] / seconds[PADDED])}
    return [Row(name, tokens / seconds[name], "tokens/s", ratio, to,
                f"{seconds[name]:.3f} s a step, MFU {work / seconds[name]:.1%}, state {held[name]:.1f} GB, "
                f"a step {peaks[name]:.1f} GB more") for name, (to, ratio) in compared.items()]


def setting(options: argparse.Namespace, lengths: Sequence[int], platform: Platform) -> str:
    padding = len(lengths) * max(lengths) / sum(lengths)
    return (f"{options.shape}, {dist.get_world_size()} ranks, tp {options.tp}, bfloat16, "
            f"{'Transformer Engine' if platform.uses_te else 'local layers'}; {len(lengths)} samples, {sum(lengths)} "
            f"tokens, longest {max(lengths)}, padded {padding:.2f} x as many; {options.max_tokens} tokens a microbatch")


if __name__ == "__main__":
    main()
