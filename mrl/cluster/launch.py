"""`mrl train`: makes the run directory, starts the fleet and the gang of trainers, follows them, and stops all."""
from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

from mrl.cluster.fleet import STOP_TIMEOUT_S, ray_address, start_fleet
from mrl.cluster.placement import place, with_device
from mrl.cluster.run_dir import prepare_run_dir, sole_owner
from mrl.cluster.trainers import Gang, metric_rows, run_gang
from mrl.config.schema import Experiment
from mrl.engine.guard import guard_this_process
from mrl.receiver.mrl_receiver.disk import discard


def train(experiment: Experiment, run_dir: Path | None) -> int:
    """Run the experiment to its end. Returns the exit code: 0 when every step was trained."""
    experiment = with_device(experiment)
    run_dir = prepare_run_dir(experiment, run_dir)
    run_id = f"{experiment.name}-{secrets.token_hex(4)}"
    guard_this_process(STOP_TIMEOUT_S)
    print(f"run directory: {run_dir}", flush=True)
    print("starting the engines and the rollout workers", flush=True)
    weights = Path(experiment.sync.disk_dir or run_dir).resolve() / f"weights-{run_id}"
    with sole_owner(run_dir), start_fleet(experiment, run_id, run_dir):
        (run_dir / "run.json").write_text(json.dumps({"run_id": run_id, "ray_address": ray_address(),
                                                      "weights": str(weights)}))
        try:
            code = run_gang(trainer_gang(experiment), run_dir)
        finally:
            discard(weights)  # the disk transport's, when the trainers died over them
    print(closing_words(experiment, run_dir, code), flush=True)
    return code


def trainer_gang(experiment: Experiment) -> Gang:
    """The trainer ranks of an RL experiment."""
    env = dict(experiment.trainer.env)
    if experiment.cluster.device == "cuda" and experiment.rollout.engine == "sglang":
        # NCCL builds no link between ends that differ in this.
        env.setdefault("NCCL_CUMEM_ENABLE", os.environ.get("NCCL_CUMEM_ENABLE", "0"))
    return Gang("mrl.cluster.rank", experiment.cluster.device, place(experiment).trainers,
                experiment.trainer.max_restarts, env)


def closing_words(experiment: Experiment, run_dir: Path, code: int) -> str:
    if code != 0:
        return f"the run failed; its logs: {run_dir}/logs. Go on from its last checkpoint with the same command and " \
               f"--run-dir {run_dir}"
    lines = []
    evaluations = [row for row in metric_rows(run_dir) if row["kind"] == "eval"]
    for name, dataset in experiment.eval.datasets.items():
        known = []
        for key in (f"{what}/mean@{dataset.samples_per_prompt}" for what in ("acc", "reward")):
            values = [row[f"eval/{name}/{key}"] for row in evaluations if f"eval/{name}/{key}" in row]
            if len(values) > 1 and values not in known:  # rewards of 0 and 1 are the accuracy
                known.append(values)
                lines.append(f"held-out {name} {key}: {values[0]:.3f} before, {values[-1]:.3f} after")
    lines += [f"run directory: {run_dir}",
              f"next: mrl export {run_dir} --step {experiment.loop.steps} --out {run_dir}/hf",
              f"      tensorboard --logdir {run_dir}/tensorboard"]
    return "\n".join(lines)
