"""Options of the trainer that save memory or time, on two ranks: gradients against transformers, and what two steps
make of the weights against a trainer without them. Used by run_trainer.py."""
from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Callable

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
        "Adam on the host": {**OVERLAP, "optimizer": {"cpu_offload": True}},
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
        "Adam on the host, sums in bfloat16": {"optimizer": {"grad_dtype": "bfloat16", "cpu_offload": True}},
    }),
)


def option_checks() -> int:
    """How many lines say ok: of the gradients, and of the steps, of every case with every option; of each that is
    resumed."""
    return sum(3 if on_host(chosen) else 2 for *_, options in CASES for chosen in options.values())


def on_host(options: dict[str, Any]) -> bool:
    return options.get("optimizer", {}).get("cpu_offload", False)


def check_options(folder: Path, platform: Platform) -> None:
    for family, words, options in CASES:
        truth = torch.load(folder / f"{family}.pt")
        with noted(f"{family} {words}"):
            make = partial(build, folder, family, parse_parallel(words), platform, lr=LEARNING_RATE)
            plain = two_steps(make(), truth)
            for option, chosen in options.items():
                of_trainer = {key: value for key, value in chosen.items() if key != "optimizer"}
                make_one = partial(make, of_trainer, **chosen.get("optimizer", {}))
                name = f"{family} {words}, {option}"
                with noted(name):
                    trainer = make_one()
                    check_gradients(trainer, truth, name)
                    check_steps(two_steps(trainer, truth), plain, name)
                    if on_host(chosen):
                        check_resumed(trainer, make_one, truth, folder / "saved", name)


def check_resumed(trainer, make_one: Callable, truth: dict, saved: Path, name: str) -> None:
    """Moments and masters wait on the host; saved and loaded they are what they were, and step on as they would."""
    state = [tensor.clone() for tensor in optimizer_state(trainer)]
    assert {tensor.device.type for tensor in state} == {"cpu"}
    trainer.save(saved)
    ahead = two_steps(trainer, truth)
    resumed = make_one()
    resumed.load(saved)
    for kept, loaded in zip(state, optimizer_state(resumed), strict=True):
        assert torch.equal(kept, loaded)
    check_steps(two_steps(resumed, truth), ahead, f"{name}, resumed")


def optimizer_state(trainer) -> list[torch.Tensor]:
    """Masters and moments."""
    from mrl.trainer.megatron_compat import masters

    return [tensor for inner in trainer.optimizer.inner
            for params in [[param for group in inner.param_groups for param in group["params"]]]
            for param, master in zip(params, masters(inner), strict=True)
            for tensor in (master, inner.state[param]["exp_avg"], inner.state[param]["exp_avg_sq"])]


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
