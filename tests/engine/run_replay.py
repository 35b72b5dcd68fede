"""Under torchrun, one rank: a trainer with an engine's samples and its experts. Arguments: model, another, samples."""
from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tests.trainer.gang import experiment, gang
from tests.trainer.routing import record


def compare(model: Path, other: Path, samples: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    """`same`: share of the engine's choices that the trainer with the same weights makes too; and the mean difference
    of log-probs from the engine's, by the routing of a trainer with the weights in `other`."""
    from mrl.trainer.trainer import Trainer

    found = {}
    chosen = record(Trainer(experiment(model), PLATFORM, 1), samples, [samples])
    alike = [(own.sort(-1).values == sample["experts"].sort(-1).values).all(-1)[:-1]
             for own, sample in zip(chosen, samples, strict=True)]
    found["same"] = torch.cat(alike).float().mean().item()
    for routing in ("own", "replay"):
        settings = experiment(other)
        section = settings.trainer.model_copy(update={"moe_routing": routing})
        trainer = Trainer(settings.model_copy(update={"trainer": section}), PLATFORM, 1)
        log_probs = trainer.log_probs([samples])
        differences = [(own - sample["log_probs"])[sample["sampled"]].abs()
                       for own, sample in zip(log_probs, samples, strict=True)]
        found[routing] = torch.cat(differences).mean().item()
    return found


if __name__ == "__main__":
    with gang() as PLATFORM:
        print("FOUND", json.dumps(compare(Path(sys.argv[1]), Path(sys.argv[2]), torch.load(sys.argv[3]))))
