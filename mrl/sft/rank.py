"""One rank of a supervised fine-tuning, as torchrun starts it: `python -m mrl.sft.rank RUN_DIR ATTEMPT`.

The loss is the negative log-likelihood of the answers, end-of-sequence token included: the mean over the answer tokens
of a step's samples.
"""
from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mrl.cluster.rank_log import recorded
from mrl.config.load import load_sft
from mrl.config.sft import SftExperiment
from mrl.data.order import PromptOrder
from mrl.data.tokenize import PromptEncoder
from mrl.observe.runlog import RunLog
from mrl.platform import get_platform
from mrl.sft.samples import make_samples, share_of
from mrl.trainer.files import checkpoint_dir, saved_steps
from mrl.trainer.metrics import gather_metrics
from mrl.trainer.microbatch import Sample

if TYPE_CHECKING:  # it can be imported only after the platform was installed
    from mrl.trainer.trainer import Trainer

WINDOW = 20
"""Steps between progress lines, and steps that `stop_below` averages over."""
ORDER = "order.json"


def nll_loss(log_probs: torch.Tensor, entropy: torch.Tensor, fields: dict[str, torch.Tensor]):
    """Σ w·(-log p) over answer tokens, with weights that sum to 1 over the batch."""
    loss = -torch.where(fields["loss_mask"], fields["token_weight"] * log_probs, 0.0).sum()
    return loss, {"nll": loss}


def heldout_nll(trainer: Trainer, microbatches: list[list[Sample]]) -> float:
    """Σ w·(-log p) over all replicas, without training; `microbatches`: this replica's share. Collective."""
    samples = [sample for microbatch in microbatches for sample in microbatch]
    total = 0.0
    for sample, log_probs in zip(samples, trainer.log_probs(microbatches), strict=True):
        total -= (sample["token_weight"] * log_probs).double().sum().item()
    return gather_metrics({"nll": total} if trainer.leads_replica else {})["nll"]


class SftLoop:
    """The steps of one fine-tuning. Collective; `log` on rank 0 alone."""

    def __init__(self, experiment: SftExperiment, trainer: Trainer, run_dir: Path, log: RunLog | None):
        self.experiment, self.trainer, self.run_dir, self.log = experiment, trainer, run_dir, log
        data = experiment.data
        encoder = PromptEncoder(experiment.model.path, data, experiment.model.chat_template)
        longest = experiment.batch.max_tokens_per_microbatch
        self.samples = make_samples(encoder, data.train, data, longest)
        self.heldout = make_samples(encoder, data.eval, data, longest) if experiment.eval.every else []
        self.order = PromptOrder(len(self.samples), experiment.seed, data.shuffle)
        self.step, self.began, self.recent = 0, time.monotonic(), deque(maxlen=WINDOW)

    def run(self) -> None:
        """From the newest checkpoint, or from step 0, to `steps` or `stop_below`; then write the result to `out`."""
        self.restore()
        if self.step == 0:
            self.evaluate()
        enough = False
        while self.step < self.experiment.steps and not enough:
            metrics = self.train()
            self.recent.append(metrics["nll"])
            average = sum(self.recent) / len(self.recent)
            enough = len(self.recent) == WINDOW and average < self.experiment.stop_below
            last = enough or self.step == self.experiment.steps
            self.report(metrics, average, last)
            if last or self._due(self.experiment.eval.every):
                self.evaluate()
            if last or self._due(self.experiment.checkpoint.every):
                self.save()
        self.trainer.export(self.experiment.out)
        if self.log:
            self.log.say(f"wrote {self.experiment.out}")

    def train(self) -> dict[str, float]:
        """One optimizer step on the next samples."""
        chosen = [self.samples[draw.row] for draw in self.order.take(self.experiment.batch.samples_per_step)]
        metrics = self.trainer.train(self._share(chosen), nll_loss)
        self.step += 1
        return metrics

    def evaluate(self) -> None:
        """The loss of the held-out samples, if there are any: the mean over all their answer tokens."""
        if not self.heldout:
            return
        nll = heldout_nll(self.trainer, self._share(self.heldout))
        if self.log:
            self.log.metrics(self.step, {"kind": "eval", "eval/nll": nll})
            self.log.say(f"held-out nll after step {self.step}: {nll:.4f} ({len(self.heldout)} samples)")

    def report(self, metrics: dict[str, float], average: float, last: bool) -> None:
        """Every step's metrics; a line for the user every WINDOW steps and at the end."""
        if not self.log:
            return
        self.log.metrics(self.step, {"kind": "train", **{f"train/{name}": value for name, value in metrics.items()}})
        if self.step % WINDOW == 0 or last:
            self.log.say(f"step {self.step}/{self.experiment.steps} nll {average:.4f} grad {metrics['grad_norm']:.3f} "
                         f"lr {metrics['lr']:.2e} {time.monotonic() - self.began:.0f}s")

    def save(self) -> None:
        """A checkpoint of this step; the oldest are dropped."""
        extra = {ORDER: json.dumps(self.order.state()).encode()} if self.log else {}
        self.trainer.save(checkpoint_dir(self.run_dir, self.step), extra)
        if self.log:
            for old in saved_steps(self.run_dir)[:-self.experiment.checkpoint.keep]:
                shutil.rmtree(checkpoint_dir(self.run_dir, old))

    def restore(self) -> None:
        """Go on from the newest checkpoint, if there is one."""
        if steps := saved_steps(self.run_dir):
            directory, self.step = checkpoint_dir(self.run_dir, steps[-1]), steps[-1]
            self.trainer.load(directory)
            self.order.restore(json.loads((directory / ORDER).read_text()))

    def _share(self, samples: list[Sample]) -> list[list[Sample]]:
        return share_of(samples, self.trainer.layout.replicas, self.trainer.dp_rank,
                        self.experiment.batch.max_tokens_per_microbatch)

    def _due(self, every: int) -> bool:
        return bool(every) and self.step % every == 0


def main(run_dir: Path, attempt: int) -> None:
    rank = int(os.environ["RANK"])
    with recorded(run_dir, rank):
        run_rank(run_dir, rank, attempt)


def run_rank(run_dir: Path, rank: int, attempt: int) -> None:
    experiment = load_sft(run_dir / "config.yaml")
    platform = get_platform(experiment.cluster.device)
    platform.set_device(int(os.environ["LOCAL_RANK"]))
    platform.install()
    dist.init_process_group(platform.backend)

    from mrl.trainer.trainer import Trainer

    trainer = Trainer(experiment, platform, experiment.steps)
    log = RunLog(run_dir, experiment.log, experiment.steps, attempt) if rank == 0 else None
    SftLoop(experiment, trainer, run_dir, log).run()
    if log:
        log.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
