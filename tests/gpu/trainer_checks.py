"""What the trainer in bfloat16 is held to: its log-probs and gradients against those of transformers.

The yardstick is transformers itself in bfloat16: mrl may be so many times as far from the fp32 truth as that is.
"""
from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

import torch
import torch.distributed as dist

from mrl.platform import Platform
from tests.trainer.gang import experiment, whole_gradients
from tests.trainer.tiny import loss_fn

ERROR_RATIO = 2.0
"""Of the mean over all tokens."""
GRADIENT_RATIO = 3.0
"""Of the tensor that does worst. Leaving out half of the ranks makes 10 and more."""


def flat(log_probs: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([sample[1:] for sample in log_probs])


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


@contextmanager
def noted(name: str) -> Iterator[None]:
    """An error within the block is a line of the output."""
    try:
        yield
    except Exception as error:
        text = f"{type(error).__name__}: {error}".replace("\n", " | ")
        print(f"FAILED {name}: rank {dist.get_rank()}: {text}", flush=True)


def build(folder: Path, family: str, parallel: dict, platform: Platform, options: dict | None = None, **optimizer):
    """A trainer in bfloat16 that can be told the experts of its tokens."""
    from mrl.trainer.trainer import Trainer

    settings = experiment(folder / family, parallel, dtype="bfloat16", **optimizer)
    replay = {"moe_routing": "replay"} if family.endswith("moe") else {}
    section = settings.trainer.model_validate({**settings.trainer.model_dump(), **replay, **(options or {})})
    return Trainer(settings.model_copy(update={"trainer": section}), platform, total_steps=10)


def own_choice(batch: list[dict]) -> list[dict]:
    """The batch, its tokens sent to experts as the trainer's routers choose."""
    return [{name: field for name, field in sample.items() if name != "experts"} for sample in batch]


def check_log_probs(trainer, truth: dict, name: str) -> None:
    """Packed into one row, one by one, and with an empty microbatch; each against the fp32 truth."""
    batch, reference = own_choice(truth["batch"]), flat(truth["log_probs"])
    yardstick = float((flat(truth["bfloat16"]["log_probs"]) - reference).abs().mean())
    shapes = {"packed": [batch], "alone": [[sample] for sample in batch], "two": [batch[:3], [], batch[3:]]}
    got = {shape: flat(trainer.log_probs(microbatches)) for shape, microbatches in shapes.items()}
    errors = {shape: float((values - reference).abs().mean()) for shape, values in got.items()}
    apart = (got["packed"] - got["alone"]).abs()
    assert all(error <= ERROR_RATIO * yardstick for error in errors.values()), (errors, yardstick)
    assert float(apart.mean()) <= ERROR_RATIO * yardstick, float(apart.mean())
    say(f"ok {name}: mean |Δ log p| to fp32: " + ", ".join(f"{shape} {error:.2e}" for shape, error in errors.items())
        + f"; transformers bf16 {yardstick:.2e}; packed - alone mean {float(apart.mean()):.2e}, "
        + f"max {float(apart.max()):.2e}")


def relative_errors(gradients: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, float]:
    """Of whole tensors."""
    assert gradients.keys() == exact.keys()
    return {key: float((gradients[key].float() - value).norm() / value.norm()) for key, value in exact.items()}


def check_gradients(trainer, truth: dict, name: str) -> None:
    """Every gradient of the model, from a step whose update is discarded.

    Tokens go to the experts that the fp32 model chose, in transformers' bfloat16 too: a token that goes elsewhere for
    its rounding would change every gradient by more than a defect may. A small tensor's yardstick is chance; it may be
    as far off as the model's typical one.
    """
    from mrl.trainer.optimizer import StepReport

    gradients = {}

    def keep() -> StepReport:
        gradients.update(whole_gradients(trainer))
        return StepReport(0.0, 0.0, True)

    trainer.optimizer.step = keep
    mine = truth["batch"][trainer.dp_rank::trainer.layout.replicas]
    loss = trainer.train([mine[:3], [], mine[3:]], loss_fn)["loss"]
    del trainer.optimizer.step
    if dist.get_rank():
        return
    errors = relative_errors(gradients, truth["gradients"])
    rough = relative_errors(truth["bfloat16"]["gradients"], truth["gradients"])
    typical = sorted(rough.values())[len(rough) // 2]
    ratios = {key: error / max(rough[key], typical) for key, error in errors.items()}
    worst = max(ratios, key=ratios.get)
    beyond = {key: (errors[key], rough[key]) for key, ratio in ratios.items() if ratio > GRADIENT_RATIO}
    assert not beyond, f"(error, that of transformers in bfloat16; typical {typical:.2e}): {beyond}"
    say(f"ok {name}: loss {loss:.5f} (fp32 {truth['loss']:.5f}); gradient error typically "
        f"{sorted(errors.values())[len(errors) // 2]:.1e} (transformers bf16 {typical:.1e}), at worst "
        f"{errors[worst]:.1e} ({rough[worst]:.1e}), {worst}")
