"""One rank: what a trainer makes of an engine's samples and its choice of experts. Arguments: model, samples."""
from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tests.trainer.gang import experiment, gang
from tests.trainer.routing import REPLAY, record, shifted


def compare(model: Path, samples: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    """`same`: share of the engine's choices that the trainer makes too. By choice that is replayed, the engine's and
    its neighbours: the mean difference of the sampled tokens' log-probs from the engine's."""
    from mrl.trainer.trainer import Trainer

    settings = experiment(model)
    trainer = Trainer(settings.model_copy(update={"trainer": settings.trainer.model_copy(update=REPLAY)}), PLATFORM, 1)
    chosen = record(trainer, samples, [[{**sample, "experts": torch.full_like(sample["experts"], -1)}
                                        for sample in samples]])
    alike = [(own.sort(-1).values == sample["experts"].sort(-1).values).all(-1)[:-1]
             for own, sample in zip(chosen, samples, strict=True)]
    found = {"same": torch.cat(alike).float().mean().item()}
    experts = trainer.spec.moe.num_experts
    for name, change in (("engine", lambda told: told), ("neighbours", lambda told: shifted(told, experts))):
        log_probs = trainer.log_probs([[{**sample, "experts": change(sample["experts"])} for sample in samples]])
        differences = [(mine - sample["log_probs"])[sample["sampled"]].abs()
                       for mine, sample in zip(log_probs, samples, strict=True)]
        found[name] = torch.cat(differences).mean().item()
    return found


if __name__ == "__main__":
    with gang() as PLATFORM:
        print("FOUND", json.dumps(compare(Path(sys.argv[1]), torch.load(sys.argv[2]))))
