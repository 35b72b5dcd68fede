"""How far the log-probs of trainer and engine are apart, for the same weights and the same sampled tokens.

    torchrun --nproc-per-node 1 tools/logprob_diff.py --python ENGINE_PYTHON --model DIR [--engine sglang] [--json FILE]

The engine samples responses to two-digit additions at temperature 1 and says the log-prob of every token; mrl's trainer
then computes them for the same tokens, packed. Both have read the same model directory, and are on the same GPU. The
ranks are data-parallel.
"""
from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Optional, Sequence

import ray
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from mrl.config.schema import Experiment  # noqa: E402
from mrl.data.tokenize import PromptEncoder  # noqa: E402
from mrl.engine.api import Completion, GenerateRequest  # noqa: E402
from mrl.platform import Platform  # noqa: E402
from mrl.trainer.microbatch import assign  # noqa: E402
from tools import one_engine  # noqa: E402
from tools.gang import gang, shared_folder  # noqa: E402
from tools.make_quickstart import make_problems  # noqa: E402
from tools.measure import Record, Row, hand_over  # noqa: E402
from tools.workload import random_model  # noqa: E402

PROMPT_TOKENS, MICROBATCH_TOKENS, ASKED_AT_ONCE = 128, 16384, 256
ROUNDS = 100
"""Of ASKED_AT_ONCE requests, after which there must be enough tokens."""


def parse(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    one_engine.add_options(parser)
    one_engine.add_model_options(parser, "qwen3-0.6b")
    parser.add_argument("--tokens", type=int, default=10_000, help="sampled tokens to compare, at least")
    parser.add_argument("--longest", type=int, default=64, help="tokens of a response")
    return parser.parse_args(argv)


def main() -> None:
    options = parse()
    with gang(options.device) as platform:
        compare(options, platform)


def compare(options: argparse.Namespace, platform: Platform) -> None:
    """Sample on rank 0, compute on all, report on rank 0. Collective."""
    from mrl.trainer.trainer import Trainer

    rank = dist.get_rank()
    with ExitStack() as stack:
        folder = stack.enter_context(shared_folder())
        if rank == 0 and not options.model:
            random_model(folder / "model", options.shape, platform.device())
        dist.barrier()
        exp = experiment(options, options.model or folder / "model")
        trainer = Trainer(exp, platform, total_steps=1)
        sampled: list = [None]
        if rank == 0:
            gate = stack.enter_context(one_engine.running(exp, folder, load_weights=True))
            sampled = [sample(gate, exp, options.tokens)]
        dist.broadcast_object_list(sampled)
        found = differences(trainer, sampled[0])
        if rank == 0:
            about = (f"{options.model.name if options.model else options.shape}, {options.dtype}, {options.engine}, "
                     f"{'Transformer Engine' if platform.uses_te else 'local layers'}; responses of up to "
                     f"{options.longest} tokens at temperature 1")
            hand_over(Record("logprob_diff", about, rows(found)), options.json)


def experiment(options: argparse.Namespace, model: Path) -> Experiment:
    return Experiment.model_validate({
        "name": "logprob-diff", "model": {"path": str(model), "dtype": options.dtype},
        "data": {"train": "unused", "max_prompt_tokens": PROMPT_TOKENS},
        "batch": {"prompts_per_step": 1, "samples_per_prompt": 2},
        "rollout": {"engine": options.engine, "python": options.python, "parallel": {"tp": options.engine_tp},
                    "max_concurrent_requests": ASKED_AT_ONCE,
                    "args": one_engine.arguments(options, graphs=not options.eager),
                    "sampling": {"max_response_tokens": options.longest}, "start_timeout_s": options.start_timeout},
        "loop": {"steps": 1, "mode": "colocated_sync", "sleep_engines": False, "offload_trainers": False},
        "cluster": {"device": options.device, "gpus": dist.get_world_size()}})


def sample(gate: ray.actor.ActorHandle, exp: Experiment, tokens: int) -> list[tuple[list[int], Completion]]:
    """Prompts and what the engine makes of them, until it has sampled so many tokens.

    SystemExit when responses are so short that ROUNDS do not suffice.
    """
    encoder = PromptEncoder(exp.model.path, exp.data)
    problems, found, total = make_problems(seed=1)[0], [], 0
    for turn in range(ROUNDS):
        first = turn * ASKED_AT_ONCE
        prompts = [encoder.encode(problems[index % len(problems)]) for index in range(first, first + ASKED_AT_ONCE)]
        done = ray.get([gate.generate.remote(GenerateRequest(
            prompt, first + index, exp.rollout.sampling.max_response_tokens, 1.0, stop_token_ids=encoder.stop_ids))
            for index, prompt in enumerate(prompts)])
        found += zip(prompts, done)
        total += sum(len(completion.token_ids) for completion in done)
        if total >= tokens:
            return found
    raise SystemExit(f"{ROUNDS * ASKED_AT_ONCE} responses have only {total} tokens: ask for fewer --tokens")


def differences(trainer, sampled: Sequence[tuple[list[int], Completion]]) -> torch.Tensor:
    """The trainer's log-prob less the engine's: fp32, one for each sampled token, on every rank. Collective."""
    samples = [{"tokens": torch.tensor([*prompt, *completion.token_ids])} for prompt, completion in sampled]
    shares = assign([len(one["tokens"]) for one in samples], trainer.layout.replicas, MICROBATCH_TOKENS)
    mine = shares[trainer.dp_rank]
    log_probs = trainer.log_probs([[samples[index] for index in microbatch] for microbatch in mine])
    by_index = dict(zip((index for microbatch in mine for index in microbatch), log_probs))
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, by_index)
    whole = {index: values for part in everyone for index, values in part.items()}
    return torch.cat([whole[index][len(prompt):] - torch.tensor(completion.log_probs)
                      for index, (prompt, completion) in enumerate(sampled)])


def rows(found: torch.Tensor) -> list[Row]:
    size, about = found.abs(), f"{len(found)} tokens"
    return [Row("mean |Δ log p|", size.mean().item(), "nats", notes=about),
            Row("99th percentile", size.quantile(0.99).item(), "nats"),
            Row("max |Δ log p|", size.max().item(), "nats"),
            Row("mean Δ log p", found.mean().item(), "nats", notes="trainer less engine")]


if __name__ == "__main__":
    main()
