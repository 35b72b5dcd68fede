"""`mrl sft`: makes the run directory, starts the trainer ranks and follows them."""
from __future__ import annotations

from pathlib import Path

from mrl.cluster.fleet import STOP_TIMEOUT_S
from mrl.cluster.placement import with_device
from mrl.cluster.run_dir import prepare_run_dir, sole_owner
from mrl.cluster.trainers import Gang, run_gang
from mrl.config.sft import SftExperiment
from mrl.engine.guard import guard_this_process
from mrl.preflight import visible_devices


def train(experiment: SftExperiment, run_dir: Path | None) -> int:
    """Run the fine-tuning to its end. Returns the exit code: 0 when the result was written to `out`."""
    experiment = with_device(experiment)
    run_dir = prepare_run_dir(experiment, run_dir)
    guard_this_process(STOP_TIMEOUT_S)
    print(f"run directory: {run_dir}", flush=True)
    with sole_owner(run_dir):
        code = run_gang(trainer_gang(experiment), run_dir)
    if code:
        print(f"the run failed; its logs: {run_dir}/logs. Go on from its last checkpoint with the same command and "
              f"--run-dir {run_dir}", flush=True)
    return code


def trainer_gang(experiment: SftExperiment) -> Gang:
    """The trainer ranks: the first GPUs that may be used."""
    names = visible_devices() if experiment.cluster.device == "cuda" else None
    names = [str(index) for index in range(experiment.cluster.trainer_gpus)] if names is None else names
    return Gang("mrl.sft.rank", experiment.cluster.device, tuple(names[:experiment.cluster.trainer_gpus]),
                experiment.trainer.max_restarts, experiment.trainer.env)
