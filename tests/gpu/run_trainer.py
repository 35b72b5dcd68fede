"""Under torchrun: the trainer in bfloat16 against transformers. Arguments: folder, then layouts like tp=2,pp=2,sp=1.

The yardstick is transformers itself in bfloat16: mrl may be at most ERROR_RATIO as far from the fp32 truth as that is.
Transformer Engine layers where it is installed. The device is the GPU where there is one (on the CPU: a dry run).
"""
from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from mrl.platform import get_platform
from tests.gpu.models import SMALL
from tests.trainer.gang import experiment, parse_parallel, whole_gradients
from tests.trainer.tiny import families, loss_fn, make_batch

ERROR_RATIO = 2.0
GRADIENT_TOLERANCE = 0.1
"""Relative, of whole tensors; bfloat16 alone makes about half of it. A swapped head or a wrong sum makes 1 or more."""
ROUTED_TOLERANCE = 0.5
"""The same for experts and routers: in bfloat16 a token may go to another expert, and some experts see few tokens.
Leaving out half of the ranks makes 0.7."""
STEP_SAMPLES, STEP_TOKENS = 16, 1024


def flat(log_probs: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([sample[1:] for sample in log_probs])


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def check_log_probs(trainer, batch, truth: dict, name: str) -> None:
    """Packed into one row, one by one, and with an empty microbatch; each against the fp32 truth."""
    reference = flat(truth["log_probs"])
    yardstick = float((flat(truth["bfloat16"]) - reference).abs().mean())
    shapes = {"packed": [batch], "alone": [[sample] for sample in batch], "two": [batch[:3], [], batch[3:]]}
    got = {shape: flat(trainer.log_probs(microbatches)) for shape, microbatches in shapes.items()}
    errors = {shape: float((values - reference).abs().mean()) for shape, values in got.items()}
    apart = (got["packed"] - got["alone"]).abs()
    say(f"ok {name}: mean |Δ log p| to fp32: " + ", ".join(f"{shape} {error:.2e}" for shape, error in errors.items())
        + f"; transformers bf16 {yardstick:.2e}; packed - alone mean {float(apart.mean()):.2e}, "
        + f"max {float(apart.max()):.2e}")
    assert all(error <= ERROR_RATIO * yardstick for error in errors.values()), (name, errors, yardstick)
    assert float(apart.mean()) <= ERROR_RATIO * yardstick


def check_gradients(trainer, batch, truth: dict, name: str) -> None:
    """Every gradient of the model, from a step whose update is discarded."""
    from mrl.trainer.optimizer import StepReport

    gradients = {}

    def keep() -> StepReport:
        gradients.update(whole_gradients(trainer))
        return StepReport(0.0, 0.0, True)

    trainer.optimizer.step = keep
    metrics = trainer.train([batch[:3], [], batch[3:]], loss_fn)
    if dist.get_rank():
        return
    assert gradients.keys() == truth["gradients"].keys()
    errors = {key: float((gradients[key].float() - value).norm() / value.norm())
              for key, value in truth["gradients"].items()}
    worst = max(errors, key=errors.get)
    say(f"ok {name}: loss {metrics['loss']:.5f} (fp32 {truth['loss']:.5f}); worst gradient error {errors[worst]:.1e} "
        f"({worst})")
    limits = {key: ROUTED_TOLERANCE if ".experts." in key or ".gate." in key else GRADIENT_TOLERANCE for key in errors}
    beyond = {key: error for key, error in errors.items() if error > limits[key]}
    assert not beyond, beyond


def time_steps(trainer, vocab: int, name: str) -> None:
    """Seconds of log_probs and of whole optimizer steps."""
    batch = make_batch(vocab, [STEP_TOKENS] * STEP_SAMPLES)
    half = STEP_SAMPLES // 2
    microbatches = [batch[:half], batch[half:]]
    for what, step in (("log_probs", lambda: trainer.log_probs(microbatches)),
                       ("train", lambda: trainer.train(microbatches, loss_fn))):
        seconds = []
        for _ in range(4):
            trainer.platform.synchronize()
            began = time.perf_counter()
            step()
            trainer.platform.synchronize()
            seconds.append(time.perf_counter() - began)
        tokens = STEP_SAMPLES * STEP_TOKENS
        say(f"time {name} {what}: {min(seconds[1:]):.3f} s for {tokens} tokens ({tokens / min(seconds[1:]):,.0f}/s; "
            f"first {seconds[0]:.2f} s); memory {trainer.platform.memory()}")


def main(folder: Path, layouts: list[str]) -> None:
    platform = get_platform("auto")
    platform.set_device(int(os.environ["LOCAL_RANK"]))
    platform.install()
    dist.init_process_group(platform.backend)
    from mrl.trainer.trainer import Trainer

    try:
        for words in layouts:
            for family in families(parse_parallel(words), [*SMALL, "qwen3_0_6b"]):
                if not (folder / f"{family}.pt").exists():
                    continue
                truth = torch.load(folder / f"{family}.pt")
                name = f"{family} {words} {'TE' if platform.uses_te else 'local'}"
                trainer = Trainer(experiment(folder / family, parse_parallel(words), dtype="bfloat16"), platform,
                                  total_steps=10)
                check_log_probs(trainer, truth["batch"], truth, name)
                if family == "qwen3_0_6b" and platform.name == "cuda":
                    time_steps(trainer, trainer.spec.vocab, name)
                elif "gradients" in truth:
                    check_gradients(trainer, truth["batch"], truth, name)
                del trainer
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
