"""Run by torchrun: a trainer of one rank that dies in the middle of a push to an engine.

Arguments: experiment.json, Ray address, name of the engine's actor, step, messages to send before it kills itself.
"""
import os
import signal
import sys
from pathlib import Path

import ray
import torch.distributed as dist

from mrl.config.schema import Experiment
from mrl.engine.api import Version
from mrl.reshard.layout import Layout
from mrl.stream.links import Links
from mrl.stream.sync import WeightSync
from tests.stream.engines import NAMESPACE, RUN_ID
from tests.stream.tiny import FakeTrainer, weights


def main(config: str, address: str, name: str, step: int, count: int) -> None:
    experiment = Experiment.model_validate_json(Path(config).read_text())
    dist.init_process_group("gloo")
    ray.init(address=address, namespace=NAMESPACE, logging_level="ERROR")
    trainer = FakeTrainer(Path(experiment.model.path), Layout(), Layout().coord(0))
    trainer.become(weights(trainer.model, step))
    sync = WeightSync(experiment, trainer, [ray.get_actor(name)], RUN_ID)
    start, sent = Links.start, []

    def start_some(links, *arguments):
        if len(sent) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        sent.append(1)
        return start(links, *arguments)

    Links.start = start_some
    sync.push(Version(0, step))


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
