"""Under torchrun: families and layouts against transformers. Arguments: folder, "all" or "even" or "odd", then
tp=2,pp=2,… each.

Of a layout's families, "even" and "odd" take every second one, other ones in the next layout.
"""
from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.trainer.gang import experiment, gang, parse_parallel, whole_gradients
from tests.trainer.tiny import LENGTHS, families, loss_fn

TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-5
PARTS = {"all": lambda number, of: of, "even": lambda number, of: of[number % 2::2],
         "odd": lambda number, of: of[(number + 1) % 2::2]}


def check(folder: Path, part: str, layouts: list[str]) -> None:
    """Assert log-probs, entropy, loss and gradients of these families under every layout.

    A rank alone meets all splits in microbatches with every model. Several meet one with a model and the next one with
    the next, so that each layout and, over the layouts, each family meets all.
    """
    with gang() as platform:
        from mrl.trainer.trainer import Trainer

        batch = torch.load(folder / "batch.pt")
        for number, words in enumerate(layouts):
            parallel = parse_parallel(words)
            # Untied, then tied, then untied in one process: nothing of a model may outlive it.
            for turn, family in enumerate(PARTS[part](number, families(parallel)), start=number):
                began = time.perf_counter()
                truth = torch.load(folder / f"{family}.pt")
                trainer = Trainer(experiment(folder / family, parallel), platform, total_steps=10)
                assert {name: getattr(trainer.layout, name) for name in parallel if name != "sequence_parallel"}.items(
                    ) <= parallel.items()
                check_log_probs(trainer, batch, truth)
                chosen = list(splits(trainer.layout.replicas))
                check_gradients(trainer, batch, truth, chosen[turn % 3:][:1] if dist.get_world_size() > 1 else chosen)
                if dist.get_rank() == 0:
                    print(f"ok {family} {words} {time.perf_counter() - began:.1f}s", flush=True)


def splits(dp: int):
    """(order of samples, token budget) -> microbatches by sample index, per dp rank; some microbatches are empty."""
    from mrl.trainer.microbatch import assign

    everything = list(range(len(LENGTHS)))
    yield assign(LENGTHS, dp, 200)
    yield assign(LENGTHS, dp, 31)
    reverse = everything[::-1]
    yield [[reverse[rank::dp], []] for rank in range(dp)]


def check_log_probs(trainer, batch, truth) -> None:
    """Also shows that packing does not matter: transformers saw every sample alone."""
    mine = next(iter(splits(trainer.layout.replicas)))[trainer.dp_rank]
    got = trainer.log_probs([[batch[i] for i in microbatch] for microbatch in mine])
    for index, log_prob in zip([i for microbatch in mine for i in microbatch], got, strict=True):
        torch.testing.assert_close(log_prob, truth["log_probs"][index], atol=TOLERANCE, rtol=0)


def check_gradients(trainer, batch, truth, chosen) -> None:
    """The gradient of the batch, whatever the split of those chosen; entropy and metrics on the way."""
    entropies = {}

    def loss_and_entropy(log_probs, entropy, fields):
        for piece, index in zip(entropy.detach().split([len(batch[i]["tokens"]) for i in seen[0]]), seen.pop(0)):
            entropies[index] = piece
        return loss_fn(log_probs, entropy, fields)

    for split in chosen:
        mine = split[trainer.dp_rank]
        seen = [microbatch for microbatch in mine if microbatch]
        step = trainer.optimizer.step
        gradients = {}
        trainer.optimizer.step = lambda: (gradients.update(clone(whole_gradients(trainer))), measure(trainer))[1]
        metrics = trainer.train([[batch[i] for i in microbatch] for microbatch in mine], loss_and_entropy)
        trainer.optimizer.step = step
        assert metrics["tokens"] == sum(LENGTHS), metrics
        assert abs(metrics["advantage_max"] - max(float(s["advantages"].max()) for s in batch)) < 1e-6
        assert abs(metrics["loss"] - truth["loss"]) < TOLERANCE, (metrics, truth["loss"])
        norm = float(torch.stack([gradient.norm() for gradient in truth["gradients"].values()]).norm())
        assert abs(metrics["grad_norm"] / norm - 1) < TOLERANCE, (metrics, norm)
        same = [None] * dist.get_world_size()
        dist.all_gather_object(same, metrics)
        assert all(other == metrics for other in same)
        assert_close(gradients, truth["gradients"])
    for index, entropy in entropies.items():
        torch.testing.assert_close(entropy, truth["entropies"][index], atol=TOLERANCE, rtol=0)


def assert_close(gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """On the rank that has them."""
    if dist.get_rank():
        return
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        error = float((gradients[name] - gradient).norm() / gradient.norm().clamp(min=1e-9))
        assert error <= GRADIENT_TOLERANCE, f"{name}: relative error {error:.2e}"


def clone(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


def measure(trainer):
    """An optimizer step that stops after the gradient norm, so that the next split sees the same parameters."""
    from mrl.trainer.optimizer import StepReport

    trainer.optimizer.megatron.prepare_grads()
    return StepReport(trainer.optimizer.megatron.get_grad_norm(), lr=0.0, skipped=True)


if __name__ == "__main__":
    check(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
