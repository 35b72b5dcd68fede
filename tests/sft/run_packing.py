"""Under torchrun: packed and unpacked samples give the same loss, gradient and held-out loss. Argument: folder."""
from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.trainer.gang import experiment, gang, whole_gradients

LENGTHS = (9, 5, 17, 4, 30, 12, 6, 8)


def samples() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(11)
    return [{"tokens": torch.randint(0, 131, (length,), generator=generator),
             "loss_mask": torch.arange(length) >= length // 3} for length in LENGTHS]


def expected_nll(path: Path) -> float:
    """By transformers, one sample at a time: the mean over all answer tokens."""
    model, total, tokens = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), 0.0, 0
    for sample in samples():
        with torch.no_grad():
            log_p = model(sample["tokens"][None]).logits[0, :-1].log_softmax(-1)
        picked = log_p.gather(1, sample["tokens"][1:, None])[:, 0][sample["loss_mask"][1:]]
        total, tokens = total - picked.double().sum().item(), tokens + len(picked)
    return total / tokens


def main(folder: Path, platform) -> None:
    from mrl.sft.rank import heldout_nll, nll_loss
    from mrl.sft.samples import share_of
    from mrl.trainer.trainer import Trainer

    # lr so small that the second step starts from the same weights.
    trainer = Trainer(experiment(folder / "llama", lr=1e-12, weight_decay=0.0), platform, 4)
    trainer.temperature = 1.0
    packed = share_of(samples(), trainer.layout.replicas, trainer.dp_rank, max_tokens=1000)
    assert len(packed) == 1, "all samples of a replica fit into one row"
    alone = [[sample] for sample in packed[0]]
    alone += [[]] * (len(LENGTHS) - len(alone))  # as many on the other replica
    found = []
    for share in (packed, alone):
        losses = heldout_nll(trainer, share), trainer.train(share, nll_loss)["nll"]
        found.append(whole_gradients(trainer))
        for loss in losses:
            assert math.isclose(loss, expected_nll(folder / "llama"), rel_tol=1e-5)
    if dist.get_rank():
        return
    packed_gradients, gradients = found
    assert gradients.keys() == packed_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(packed_gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    assert max(float(gradient.abs().max()) for gradient in gradients.values()) > 1e-3


if __name__ == "__main__":
    with gang() as cpu:
        main(Path(sys.argv[1]), cpu)
