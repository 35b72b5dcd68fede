"""Supervised fine-tuning, for a warm start.

    torchrun --standalone --nproc-per-node N -m mrl.sft EXPERIMENT.yaml [key=value ...]

The same trainer, prompts and chat template as in RL; the loss is the negative log-likelihood of the answer,
end-of-sequence token included. Ends by writing a Hugging Face checkpoint directory to `out`.
"""
from __future__ import annotations

import os
import sys
import time
from collections import deque
from pathlib import Path

import torch
import torch.distributed as dist

from mrl.config.errors import UserError
from mrl.config.load import load_sft
from mrl.config.schema import SftExperiment
from mrl.platform import get_platform

WINDOW = 20
"""Steps between progress lines, and steps that `stop_below` averages over."""


def nll_loss(log_probs: torch.Tensor, entropy: torch.Tensor, fields: dict[str, torch.Tensor]):
    """Σ w·(-log p) over answer tokens, with weights that sum to 1 over the batch."""
    loss = -torch.where(fields["loss_mask"], fields["token_weight"] * log_probs, 0.0).sum()
    return loss, {"nll": loss}


def make_samples(experiment: SftExperiment) -> list[dict[str, torch.Tensor]]:
    """One sample a row: prompt through the chat template, then the answer and the end-of-sequence token."""
    from mrl.data.prompts import load_prompts
    from mrl.data.tokenize import PromptEncoder

    data = experiment.data
    encoder = PromptEncoder(experiment.model.path, data, experiment.model.chat_template)
    rows, prompts = encoder.encode_all(load_prompts(data.train, data))
    samples = []
    for row, prompt in zip(rows, prompts):
        answer = encoder.encode_text(str(row[data.answer_key])) + [encoder.eos_id]
        tokens = torch.tensor([*prompt, *answer], dtype=torch.int64)
        samples.append({"tokens": tokens, "loss_mask": torch.arange(len(tokens)) >= len(prompt)})
    return samples


def train(experiment: SftExperiment) -> None:
    """Run on every rank; rank 0 prints progress and writes the result."""
    platform = get_platform(experiment.cluster.device)
    platform.set_device(int(os.environ["LOCAL_RANK"]))
    platform.install()
    dist.init_process_group(platform.backend)

    from mrl.algorithm.weights import token_weights
    from mrl.data.order import PromptOrder
    from mrl.trainer.microbatch import assign
    from mrl.trainer.trainer import Trainer

    trainer = Trainer(experiment, platform, experiment.steps)
    samples = make_samples(experiment)
    order = PromptOrder(len(samples), experiment.seed, experiment.data.shuffle)
    began, recent = time.monotonic(), deque(maxlen=WINDOW)
    for step in range(1, experiment.steps + 1):
        chosen = [samples[draw.row] for draw in order.take(experiment.batch.samples_per_step)]
        weights = token_weights([s["loss_mask"] for s in chosen], "token_mean")
        batch = [{**sample, "token_weight": weight} for sample, weight in zip(chosen, weights)]
        share = assign([len(s["tokens"]) for s in batch], trainer.layout.replicas,
                       experiment.batch.max_tokens_per_microbatch)[trainer.dp_rank]
        metrics = trainer.train([[batch[i] for i in microbatch] for microbatch in share], nll_loss)
        recent.append(metrics["nll"])
        average = sum(recent) / len(recent)
        enough = len(recent) == WINDOW and average < experiment.stop_below
        if dist.get_rank() == 0 and (step % WINDOW == 0 or step == experiment.steps or enough):
            print(f"step {step}/{experiment.steps} nll {average:.4f} grad {metrics['grad_norm']:.3f} "
                  f"lr {metrics['lr']:.2e} {time.monotonic() - began:.0f}s", flush=True)
        if enough:
            break
    trainer.export(experiment.out)
    if dist.get_rank() == 0:
        print(f"wrote {experiment.out}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        raise SystemExit(0 if len(sys.argv) > 1 else 2)
    try:
        experiment = load_sft(Path(sys.argv[1]), sys.argv[2:])
    except UserError as error:
        raise SystemExit(str(error)) from None
    train(experiment)


if __name__ == "__main__":
    main()
