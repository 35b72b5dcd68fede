"""Run by torchrun: the ranks of a gang push versions first … last to the experiment's engine.

Arguments: experiment.json, Ray address, tp, pp, first, last. Prints one line a push: the report as JSON (rank 0).
"""
import json
import sys
from dataclasses import asdict
from pathlib import Path

import ray
import torch.distributed as dist

from mrl.config.schema import Experiment
from mrl.engine.api import Version
from mrl.reshard.layout import Layout
from mrl.stream.sync import WeightSync
from tests.stream.engines import NAMESPACE, RUN_ID, actor_name
from tests.stream.tiny import FakeTrainer, weights


def main(config: str, address: str, tp: int, pp: int, first: int, last: int) -> None:
    experiment = Experiment.model_validate_json(Path(config).read_text())
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    engines = None
    if rank == 0:
        ray.init(address=address, namespace=NAMESPACE, logging_level="ERROR")
        engines = [ray.get_actor(actor_name(experiment))]
    layout = Layout(tp=tp, pp=pp, dp=dist.get_world_size() // (tp * pp))
    trainer = FakeTrainer(Path(experiment.model.path), layout, layout.coord(rank))
    sync = WeightSync(experiment, trainer, engines, RUN_ID)
    for step in range(first, last + 1):
        trainer.become(weights(trainer.model, step))
        if rank == 0 and sync.known[0].syncs:
            ray.get(engines[0].workers.remote("mrl_scramble", "5"))
        report = sync.push(Version(0, step))
        if rank == 0:
            print("REPORT", json.dumps(asdict(report)), flush=True)
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, report)
        assert all(other == report for other in everyone), everyone
        assert rank or list(sync.left) == [sync.pushes - 1], "the keys of earlier pushes are still in the store"
    sync.close()
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
