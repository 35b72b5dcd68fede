"""Router replay under torchrun: what choices do to log-probs and gradients, in every layout. Used by run_options.py."""
from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import torch
import torch.distributed as dist

from tests.trainer.gang import whole_gradients
from tests.trainer.tiny import loss_fn

# Of four ranks, after the plain one. Every way in which a rank sees other tokens or layers, or sees them again.
LAYOUTS = {
    "qwen2_moe": [({"tp": 2, "ep": 2, "sequence_parallel": True}, {"recompute": "full"}),
                  ({"pp": 2, "vpp": 2}, {"recompute": "selective"}),
                  ({"cp": 2, "tp": 2, "sequence_parallel": True}, {"overlap_grad_reduce": True})],
    "deepseek_v3": [({"pp": 2}, {"recompute": "selective"}), ({"pp": 2, "ep": 2}, {"recompute": "full"})],
}
REPLAY = {"moe_routing": "replay"}
TOLERANCES = {"log_probs": 1e-4, "gradients": 1e-5}
NO_STEP = 1e-30  # a learning rate that leaves every weight as it is


def check(folder: Path, build: Callable, microbatches: Callable) -> None:
    batch = torch.load(folder / "batch.pt")
    for family, layouts in LAYOUTS.items():
        free = build(folder, family, {}, {}, lr=NO_STEP)
        chosen, expected = record(free, batch, microbatches(free, batch)), run(free, microbatches(free, batch))
        own = [{**sample, "experts": experts} for sample, experts in zip(batch, chosen, strict=True)]
        other = [{**sample, "experts": shifted(sample["experts"], free.spec.moe.num_experts)} for sample in own]
        plain = build(folder, family, {}, REPLAY, lr=NO_STEP)
        same_as(expected, run(plain, microbatches(plain, own)), f"{family}: its own choices")
        same_as(expected, run(plain, microbatches(plain, batch)), f"{family}: no choices")
        moved = run(plain, microbatches(plain, other))
        assert any((value - expected["log_probs"][key]).abs().max() > 1e-3 for key, value in moved["log_probs"].items())
        routers = [name for name in moved["gradients"] if name.endswith("mlp.gate.weight")]
        if dist.get_rank() == 0:  # which has the gradients
            assert routers and all(moved["gradients"][name].abs().max() > 0 for name in routers), "routers must learn"
        with plain.use_reference():
            reference = plain.log_probs(microbatches(plain, other))
        assert torch.equal(torch.cat(reference), torch.cat(expected["mine"])), "the reference chooses for itself"
        for parallel, options in layouts:
            trainer = build(folder, family, parallel, {**REPLAY, **options}, lr=NO_STEP)
            same_as(moved, run(trainer, microbatches(trainer, other)), f"{family}, {parallel}, {options}")
        if dist.get_rank() == 0:
            print("ok routing", family, flush=True)


def record(trainer, batch, rows) -> list[torch.Tensor]:
    """int16 [T, layers with experts, experts a token] of each sample of the batch, as the routers choose; -1 for its
    last token. rows: this replica's microbatches."""
    layers = [layer for layer in trainer.chunks[0].module.decoder.layers if hasattr(layer.mlp, "router")]
    found: list[list[torch.Tensor]] = [[] for _ in layers]
    handles = [layer.mlp.router.register_forward_hook(lambda *args, into=into: into.append(args[-1][1]))
               for layer, into in zip(layers, found)]
    trainer.log_probs(rows)
    for handle in handles:
        handle.remove()
    mine = []
    for number, microbatch in enumerate(rows):
        maps = torch.stack([into[number] for into in found], dim=1)
        lengths = [len(sample["tokens"]) for sample in microbatch]
        for part in maps[:sum(lengths)].split(lengths):
            experts = part.nonzero()[:, -1].view(*part.shape[:2], -1).short()
            mine.append(torch.cat([experts[:-1], torch.full_like(experts[:1], -1)]))
    return in_order(batch, rows, mine)


def shifted(experts: torch.Tensor, count: int) -> torch.Tensor:
    """Every expert's neighbour in its place, but the last token's, which stays unknown."""
    return torch.where(experts < 0, experts, (experts + 1) % count).short()


def run(trainer, rows) -> dict[str, Any]:
    """Log-probs of all samples, those of this replica ("mine"), and on rank 0 gradients of all weights; a pass each."""
    mine = trainer.log_probs(rows)
    trainer.train(rows, loss_fn)
    return {"mine": mine, "log_probs": everyone(rows, mine), "gradients": whole_gradients(trainer)}


def in_order(batch, rows, mine: list[torch.Tensor]) -> list[torch.Tensor]:
    """What each replica has of each of its samples, in the order of the batch."""
    whole = everyone(rows, mine)
    return [whole[tuple(sample["tokens"].tolist())] for sample in batch]


def everyone(rows, mine: list[torch.Tensor]) -> dict[tuple[int, ...], torch.Tensor]:
    """What all replicas have, by the tokens of the sample."""
    keys = [tuple(sample["tokens"].tolist()) for microbatch in rows for sample in microbatch]
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, dict(zip(keys, mine, strict=True)))
    return {key: value for part in parts for key, value in part.items()}


def same_as(expected: dict[str, Any], got: dict[str, Any], what: str) -> None:
    for name, tolerance in TOLERANCES.items():
        torch.testing.assert_close(got[name], expected[name], atol=tolerance, rtol=1e-4,
                                   msg=lambda text: f"{what}, {name}: {text}")
