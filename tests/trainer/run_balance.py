"""Under torchrun, 2 ranks: the load-balancing loss of experts against transformers. Arguments: folder, then layouts."""
from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.trainer.gang import experiment, gang, parse_parallel, whole_gradients
from tests.trainer.tiny import saved_gradients, watch_routers

FAMILY = "qwen3_moe"
COEF = 0.5
MICROBATCHES = [[0, 2], [3, 4]]
"""By sample index; of an even number of tokens, so that nothing is padded."""


def expected(path: Path, batch) -> dict[str, torch.Tensor]:
    """Gradients of COEF * E * Σ_e f_e P_e (Fedus et al. 2021), summed over layers, averaged over tokens."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    watch_routers(model)
    tokens = [sum(len(batch[i]["tokens"]) for i in microbatch) for microbatch in MICROBATCHES]
    experts, chosen = model.config.num_experts, model.config.num_experts_per_tok
    loss = torch.zeros(())
    for microbatch, weight in zip(MICROBATCHES, tokens):
        outputs = [model(batch[i]["tokens"][None], output_router_logits=True).router_logits for i in microbatch]
        for logits in map(torch.cat, zip(*outputs)):
            fraction = torch.zeros_like(logits).scatter(1, logits.topk(chosen).indices, 1.0).mean(0) / chosen
            loss = loss + weight / sum(tokens) * COEF * experts * (fraction * logits.softmax(-1).mean(0)).sum()
    loss.backward()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return saved_gradients(model)


def check(folder: Path, layouts: list[str]) -> None:
    """The only loss is that of the routers: whole gradients, whichever ranks and microbatches they come from."""
    with gang() as platform:
        from mrl.trainer.optimizer import StepReport
        from mrl.trainer.trainer import Trainer

        batch = torch.load(folder / "batch.pt")
        truth = expected(folder / FAMILY, batch) if dist.get_rank() == 0 else {}
        for words in layouts:
            settings = experiment(folder / FAMILY, parse_parallel(words), aux_loss_coef=COEF)
            trainer, gradients = Trainer(settings, platform, total_steps=1), {}

            def keep() -> StepReport:
                gradients.update(whole_gradients(trainer))
                return StepReport(0.0, 0.0, True)

            trainer.optimizer.step = keep
            mine = MICROBATCHES if trainer.layout.dp == 1 else [MICROBATCHES[trainer.dp_rank]]
            trainer.train([[batch[i] for i in microbatch] for microbatch in mine],
                          lambda log_probs, entropy, fields: (0.0 * log_probs.sum(), {}))
            for name, gradient in truth.items():
                error = float((gradients[name] - gradient).norm())
                assert error <= 1e-5 * float(gradient.norm()) + 1e-9, (words, name, error, float(gradient.norm()))
            if dist.get_rank() == 0:
                assert float(truth["model.layers.0.mlp.gate.weight"].norm()) > 1e-3
                print(f"ok {words}", flush=True)


if __name__ == "__main__":
    check(Path(sys.argv[1]), sys.argv[2:])
