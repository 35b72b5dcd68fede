"""Which checkpoints a run has, and what goes into one: the trainer's state and rank 0's side of the rollouts.

    checkpoints/step_000040/   trainer files (mrl/trainer/checkpoint.py), learner.json, rollouts.pkl, and batch.pkl
                               if one was waiting
"""
from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from mrl.config.schema import Checkpoint
from mrl.rollout.types import Group
from mrl.trainer.files import checkpoint_dir, saved_steps

if TYPE_CHECKING:  # the launcher, which asks for saved steps, needs no Megatron
    from mrl.learner import Learner
    from mrl.rollout.service import RolloutService
    from mrl.trainer.trainer import Trainer


class Checkpoints:
    """Saves when due, keeps the newest, restores the newest. Collective over the trainer ranks."""

    def __init__(self, run_dir: Path, config: Checkpoint, steps: int):
        self.run_dir, self.config, self.steps = run_dir, config, steps
        (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)

    def due(self, step: int) -> bool:
        return step == self.steps or bool(self.config.every) and step % self.config.every == 0

    def save(self, step: int, trainer: Trainer, learner: Learner, rollouts: RolloutService | None,
             groups: list[Group] | None) -> None:
        """Write checkpoint `step`, with the collected, untrained `groups` (on rank 0; None: none are waiting), and drop
        the oldest."""
        extra = {}
        if rollouts:
            extra["learner.json"] = json.dumps(learner.state()).encode()
            extra["rollouts.pkl"] = pickle.dumps(rollouts.state())
            if groups is not None:  # the filters may have left none of a batch
                extra["batch.pkl"] = pickle.dumps(groups)
        trainer.save(checkpoint_dir(self.run_dir, step), extra)
        if rollouts:
            for old in saved_steps(self.run_dir)[:-self.config.keep]:
                shutil.rmtree(checkpoint_dir(self.run_dir, old))

    def restore(self, trainer: Trainer, learner: Learner,
                rollouts: RolloutService | None) -> tuple[int, list[Group] | None, bool]:
        """Load the newest checkpoint: its step, its collected batch (on rank 0), and whether it has one (on all ranks).

        (0, None, False) when there is no checkpoint.
        """
        steps = saved_steps(self.run_dir)
        if not steps:
            return 0, None, False
        directory = checkpoint_dir(self.run_dir, steps[-1])
        trainer.load(directory)
        learner.restore(json.loads((directory / "learner.json").read_text()))
        batch, groups = directory / "batch.pkl", None
        if rollouts:
            rollouts.restore(pickle.loads((directory / "rollouts.pkl").read_bytes()))
            groups = pickle.loads(batch.read_bytes()) if batch.exists() else None
        return steps[-1], groups, batch.exists()
