"""Run by torchrun: the ranks of a gang push to an engine, laid out in one way after another, by every strategy.

Arguments: experiment.json, Ray address, name of the engine's actor, first version, then TP,PP for each layout. Prints
(rank 0) REPORT and the report as JSON for every push, and SAMPLED and [token ids, log-probs] after each layout's last.
"""
import json
import sys
from pathlib import Path

import ray
import torch.distributed as dist

from mrl.config.schema import Experiment
from mrl.engine.api import GenerateRequest, Version
from mrl.reshard.layout import Layout
from mrl.stream.sync import WeightSync
from tests.stream.engines import NAMESPACE, RUN_ID, STRATEGIES
from tests.stream.tiny import PROMPT, FakeTrainer, weights

PUSHES = 2
REQUEST = GenerateRequest(PROMPT, seed=3, max_tokens=20, temperature=1.0)


def main(config: str, address: str, name: str, first: int, layouts: list[str]) -> None:
    experiment = Experiment.model_validate_json(Path(config).read_text())
    dist.init_process_group("gloo")
    engines = None
    if dist.get_rank() == 0:
        ray.init(address=address, namespace=NAMESPACE, logging_level="ERROR")
        engines = [ray.get_actor(name)]
    for words in layouts:
        tp, pp = map(int, words.split(","))
        layout = Layout(tp=tp, pp=pp, dp=dist.get_world_size() // (tp * pp))
        trainer = FakeTrainer(Path(experiment.model.path), layout, layout.coord(dist.get_rank()))
        for strategy in STRATEGIES:
            settings = experiment.sync.model_copy(update={"strategy": strategy})
            sync = WeightSync(experiment.model_copy(update={"sync": settings}), trainer, engines, RUN_ID)
            push(sync, trainer, range(first, first + PUSHES))
            first += PUSHES
            sync.close()
            dist.barrier()
        if engines:
            sampled = ray.get(engines[0].generate.remote(REQUEST))
            print("SAMPLED", json.dumps([sampled.token_ids, sampled.log_probs]), flush=True)
        dist.barrier()


def push(sync: WeightSync, trainer: FakeTrainer, steps: range) -> None:
    for step in steps:
        trainer.become(weights(trainer.model, step))
        if sync.calls and step > steps.start:
            ray.get(sync.calls.engines[0].workers.remote("mrl_scramble", "5"))
        report = sync.push(Version(0, step))
        if sync.calls:
            print("REPORT", report.to_json(), flush=True)
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, report)
        assert all(other == report for other in everyone), everyone
        assert not sync.calls or list(sync.left) == [sync.pushes - 1], "keys of earlier pushes are still in the store"


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), sys.argv[5:])
