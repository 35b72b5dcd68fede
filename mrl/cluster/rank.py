"""One trainer rank, as torchrun starts it: `python -m mrl.cluster.rank RUN_DIR ATTEMPT`.

Builds the parts and runs the loop.
"""
from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from mrl.cluster.rank_log import recorded
from mrl.config.load import load_experiment
from mrl.platform import get_platform


def main(run_dir: Path, attempt: int) -> None:
    rank = int(os.environ["RANK"])
    with recorded(run_dir, rank):
        run_rank(run_dir, rank, attempt)


def run_rank(run_dir: Path, rank: int, attempt: int) -> None:
    experiment = load_experiment(run_dir / "config.yaml", [])
    platform = get_platform(experiment.cluster.device)
    platform.set_device(int(os.environ["LOCAL_RANK"]))
    platform.install()
    dist.init_process_group(platform.backend)

    from mrl.cluster.checkpoints import Checkpoints
    from mrl.cluster.fleet import Fleet, connect_ray
    from mrl.cluster.gang import Orders, Scatter, meeting
    from mrl.loop import StepLoop
    from mrl.observe.clock import Clock
    from mrl.observe.runlog import RunLog
    from mrl.rollout.service import RolloutService
    from mrl.stream.sync import WeightSync
    from mrl.trainer.offload import Offload
    from mrl.trainer.trainer import Trainer
    from mrl.turns import Turns

    steps, clock = experiment.loop.steps, Clock()
    orders = Orders(rank)
    run = json.loads((run_dir / "run.json").read_text())
    rollouts = log = engines = None
    if rank == 0:
        connect_ray(run["ray_address"], run["run_id"])
        fleet = Fleet.connect(experiment.engine_count, experiment.rollout.workers)
        engines = fleet.engines
        rollouts = RolloutService(experiment, fleet.workers, fleet.engines, attempt)
        log = RunLog(run_dir, experiment.log, steps, attempt)
        if attempt:
            log.say(f"the trainers were restarted: attempt {attempt}")
    sleeps, meet = experiment.engines_sleep(platform.name), meeting()
    if sleeps:
        if rollouts:
            rollouts.sleep()  # a gang that died may have left them awake
        meet()
    trainer = Trainer(experiment, platform, experiment.policy_updates)
    offload = Offload(trainer, platform) if experiment.trainers_offload(platform.name) else None
    sync = WeightSync(experiment, trainer, engines, run["run_id"], folder=Path(run["weights"]))
    try:
        StepLoop(experiment, trainer, sync, orders, Scatter(trainer.layout, rank),
                 Checkpoints(run_dir, experiment.checkpoint, steps), rollouts, log, attempt,
                 Turns(platform, offload, sleeps, meet, rollouts, clock), clock).run()
    finally:
        if rollouts:
            rollouts.close()
    sync.close()
    if rank == 0:
        log.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
