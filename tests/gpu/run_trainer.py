"""Under torchrun: the trainer in bfloat16 against transformers. Arguments: folder, then layouts like tp=2,pp=2,sp=1;
on two ranks the options of `trainer_options` follow.

Transformer Engine layers where it is installed. The device is the GPU where there is one (on the CPU: a dry run). What
fails is printed, on a line that starts with FAILED, and does not keep the rest from being checked.
"""
from __future__ import annotations

import os
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from mrl.platform import Platform, get_platform
from tests.gpu.models import SMALL
from tests.gpu.trainer_checks import build, check_gradients, check_log_probs, noted, say
from tests.gpu.trainer_options import check_options
from tests.trainer.gang import parse_parallel
from tests.trainer.host import apart_from_the_device
from tests.trainer.tiny import families, loss_fn, make_batch

STEP_SAMPLES, STEP_TOKENS = 16, 1024
LOST_AFTER = timedelta(seconds=120)
"""How long a rank waits for one that has failed alone."""


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


def check_layout(folder: Path, words: str, family: str, platform: Platform) -> None:
    name = f"{family} {words} {'TE' if platform.uses_te else 'local'}"
    truth = torch.load(folder / f"{family}.pt")
    trainer = build(folder, family, parse_parallel(words), platform)
    with noted(f"{name} log-probs"):
        check_log_probs(trainer, truth, name)
    if family == "qwen3_0_6b" and platform.name == "cuda":
        time_steps(trainer, trainer.spec.vocab, name)
    elif "gradients" in truth:
        with noted(f"{name} gradients"):
            check_gradients(trainer, truth, name)


def main(folder: Path, layouts: list[str]) -> None:
    platform = get_platform("auto")
    platform.set_device(int(os.environ["LOCAL_RANK"]))
    platform.install()
    dist.init_process_group(platform.backend, timeout=LOST_AFTER)
    try:
        for words in layouts:
            for family in families(parse_parallel(words), [*SMALL, "qwen3_0_6b"]):
                if (folder / f"{family}.pt").exists():
                    with noted(f"{family} {words}"):
                        check_layout(folder, words, family, platform)
        if dist.get_world_size() == 2:
            with apart_from_the_device() if platform.name == "cpu" else nullcontext():
                check_options(folder, platform)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
