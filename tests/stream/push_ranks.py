"""Run by torchrun: the ranks of a gang push to an engine, by one strategy after another.

Arguments: experiment.json, Ray address, name of the engine's actor, tp, pp, first version, pushes by each strategy,
strategies. Prints one line a push: the report as JSON (rank 0).
"""
import sys
from pathlib import Path

import ray
import torch.distributed as dist

from mrl.config.schema import Experiment
from mrl.engine.api import Version
from mrl.reshard.layout import Layout
from mrl.stream.sync import WeightSync
from tests.stream.engines import NAMESPACE, RUN_ID
from tests.stream.tiny import FakeTrainer, weights


def main(config: str, address: str, name: str, tp: int, pp: int, first: int, pushes: int, strategies: list[str]
         ) -> None:
    experiment = Experiment.model_validate_json(Path(config).read_text())
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    engines = None
    if rank == 0:
        ray.init(address=address, namespace=NAMESPACE, logging_level="ERROR")
        engines = [ray.get_actor(name)]
    layout = Layout(tp=tp, pp=pp, dp=dist.get_world_size() // (tp * pp))
    trainer = FakeTrainer(Path(experiment.model.path), layout, layout.coord(rank))
    for strategy in strategies:
        settings = experiment.sync.model_copy(update={"strategy": strategy})
        sync = WeightSync(experiment.model_copy(update={"sync": settings}), trainer, engines, RUN_ID)
        push(sync, trainer, range(first, first + pushes))
        first += pushes
        sync.close()
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
    main(*sys.argv[1:4], *map(int, sys.argv[4:8]), sys.argv[8:])
