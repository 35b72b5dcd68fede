"""Options of the trainer that save memory or time, on two ranks: gradients against transformers, and what two steps
make of the weights against a trainer without them. Used by run_trainer.py."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mrl.platform import Platform
from tests.gpu.trainer_checks import build, check_gradients, flat, noted, say
from tests.trainer.gang import parse_parallel
from tests.trainer.tiny import loss_fn

LEARNING_RATE = 1e-3
MOVED_RATIO = 0.05
"""How far apart two trainers may be after their steps, of how far these have moved each: mean |Δ log p|."""
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
# Family, layout of two ranks, and name -> options that are compared with none; "optimizer" is the section's.
CASES: tuple[tuple[str, str, dict[str, dict[str, Any]]], ...] = (
    ("qwen3", "tp=1", {
        "overlapped": {**OVERLAP, "logits_chunk": 100},
        "sums in bfloat16": {"optimizer": {"grad_dtype": "bfloat16"}},
    }),
    ("qwen3", "pp=2,vpp=2", {
        "overlapped, first layers again": {**OVERLAP, "recompute": "full", "recompute_layers": 1},
    }),
    ("qwen3", "tp=2,sp=1", {
        "parts again": {"recompute": "selective", "recompute_modules": ["core_attn", "mlp"], "logits_chunk": 100},
    }),
    ("qwen2_moe", "tp=2,sp=1,ep=2", {
        "all layers again": {"recompute": "full", "logits_chunk": 100},
        "experts again": {"recompute": "selective", "recompute_modules": ["moe"]},
    }),
    ("qwen2_moe", "cp=2,ep=2", {
        "parts again": {"recompute": "selective", "recompute_modules": ["core_attn", "shared_experts"]},
        "overlapped, sums in bfloat16": {**OVERLAP, "optimizer": {"grad_dtype": "bfloat16"}},
    }),
)


def option_checks() -> int:
    """How many lines say ok: of the gradients, and of the steps, of every case with every option."""
    return sum(2 * len(options) for *_, options in CASES)


def check_options(folder: Path, platform: Platform) -> None:
    for family, words, options in CASES:
        truth = torch.load(folder / f"{family}.pt")
        with noted(f"{family} {words}"):
            plain = two_steps(build(folder, family, parse_parallel(words), platform, lr=LEARNING_RATE), truth)
            for name, chosen in options.items():
                of_optimizer = {"lr": LEARNING_RATE, **chosen.get("optimizer", {})}
                of_trainer = {key: value for key, value in chosen.items() if key != "optimizer"}
                with noted(f"{family} {words}, {name}"):
                    trainer = build(folder, family, parse_parallel(words), platform, of_trainer, **of_optimizer)
                    check_gradients(trainer, truth, f"{family} {words}, {name}")
                    check_steps(two_steps(trainer, truth), plain, f"{family} {words}, {name}")


def two_steps(trainer, truth: dict) -> dict[str, torch.Tensor]:
    """log-probs of this replica's tokens before two optimizer steps and after."""
    mine = truth["batch"][trainer.dp_rank::trainer.layout.replicas]
    rows, found = [mine[:3], [], mine[3:]], {"before": flat(trainer.log_probs([mine]))}
    for _ in range(2):
        assert trainer.train(rows, loss_fn)["update_skipped"] == 0.0
    return {**found, "after": flat(trainer.log_probs([mine]))}


def check_steps(seen: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], name: str) -> None:
    moved = float((plain["after"] - plain["before"]).abs().mean())
    apart = float((plain["after"] - seen["after"]).abs().mean())
    assert apart <= MOVED_RATIO * moved, f"{apart:.2e} apart after steps that moved log-probs by {moved:.2e}"
    say(f"ok {name}: two steps move log-probs by {moved:.2e}, {apart:.2e} apart from those without options")
