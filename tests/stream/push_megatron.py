"""Run by torchrun: real Megatron gangs push to an engine, and both say what they think of its tokens.

Arguments: Ray address, name of the engine's actor, first step, then the experiment.json of each gang. Prints DIFFERENCE
and the largest one of the log-probs, per push.
"""
import sys
from pathlib import Path

import ray
import torch
import torch.distributed as dist

from mrl.config.schema import Experiment
from mrl.engine.api import GenerateRequest, Version
from tests.stream.engines import NAMESPACE, RUN_ID
from tests.stream.tiny import PROMPT
from tests.trainer.gang import gang

PUSHES = 3


def main(address: str, name: str, first: int, configs: list[str]) -> None:
    with gang() as platform:
        from mrl.stream.sync import WeightSync
        from mrl.trainer.trainer import Trainer

        engines = None
        if dist.get_rank() == 0:
            ray.init(address=address, namespace=NAMESPACE, logging_level="ERROR")
            engines = [ray.get_actor(name)]
        for number, config in enumerate(configs):
            experiment = Experiment.model_validate_json(Path(config).read_text())
            trainer = Trainer(experiment, platform, total_steps=PUSHES)
            sync = WeightSync(experiment, trainer, engines, RUN_ID)
            for step in range(first + number * PUSHES, first + (number + 1) * PUSHES):
                report = sync.push(Version(0, step))
                assert report.ok, report.errors
                compare(trainer, engines, step)
                train(trainer)
            sync.close()
            dist.barrier()


def compare(trainer, engines, step: int) -> None:
    answer = [None]
    if engines:
        request = GenerateRequest(PROMPT, seed=step, max_tokens=20, temperature=1.0)
        answer = [ray.get(engines[0].generate.remote(request), timeout=300)]
    dist.broadcast_object_list(answer, src=0)
    completion = answer[0]
    (log_probs,) = trainer.log_probs([[{"tokens": torch.tensor(PROMPT + completion.token_ids)}]])
    difference = (log_probs[len(PROMPT):] - torch.tensor(completion.log_probs)).abs().max().item()
    if engines:
        print("DIFFERENCE", difference, flush=True)


def train(trainer) -> None:
    """One optimizer step large enough to show."""
    sample = {"tokens": torch.tensor(PROMPT), "weights": torch.full((len(PROMPT),), 1.0 / len(PROMPT))}
    trainer.train([[sample]], lambda log_probs, entropy, fields: (-(fields["weights"] * log_probs).sum(), {}))


if __name__ == "__main__":
    main(*sys.argv[1:3], int(sys.argv[3]), sys.argv[4:])
