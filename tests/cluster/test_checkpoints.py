"""Checkpoints of a run, with stand-ins for the trainer and the rollouts: what is kept, and what is restored."""
from __future__ import annotations

import pytest

from mrl.cluster.checkpoints import Checkpoints
from mrl.config.schema import Checkpoint
from mrl.trainer.files import checkpoint_dir, saved_steps
from tests.rollout.groups import group


class Trainer:
    def __init__(self):
        self.loaded = None

    def save(self, directory, extra):
        directory.mkdir()
        for name, content in extra.items():
            (directory / name).write_bytes(content)

    def load(self, directory):
        self.loaded = directory


class Learner:
    def __init__(self, kl_coef=0.0):
        self.kl_coef = kl_coef

    def state(self):
        return {"kl_coef": self.kl_coef}

    def restore(self, state):
        self.kl_coef = state["kl_coef"]


class Rollouts:
    def __init__(self, position=0):
        self.position = position

    def state(self):
        return {"position": self.position}

    def restore(self, state):
        self.position = state["position"]


@pytest.mark.parametrize("every, due", [(0, [7]), (3, [3, 6, 7]), (7, [7])])
def test_due_every_so_often_and_after_the_last_step(tmp_path, every, due):
    checkpoints = Checkpoints(tmp_path, Checkpoint(every=every), steps=7)
    assert [step for step in range(1, 8) if checkpoints.due(step)] == due


def test_the_newest_are_kept_and_the_newest_is_restored(tmp_path):
    checkpoints = Checkpoints(tmp_path, Checkpoint(every=1, keep=2), steps=9)
    for step in (1, 2, 10):
        groups = [group(step, [1, 0])] if step > 1 else None
        checkpoints.save(step, Trainer(), Learner(0.01 * step), Rollouts(step * 8), groups)
    (tmp_path / "checkpoints" / "step_000011.tmp").mkdir()  # what a killed save leaves
    assert saved_steps(tmp_path) == [2, 10]
    trainer, learner, rollouts = Trainer(), Learner(), Rollouts()
    step, groups, has_batch = checkpoints.restore(trainer, learner, rollouts)
    assert (step, has_batch, rollouts.position, learner.kl_coef) == (10, True, 80, 0.1)
    assert trainer.loaded == checkpoint_dir(tmp_path, 10)
    assert [g.request.group_id for g in groups] == [10]
    assert groups[0].trajectories[0].tokens.tolist() == group(10, [1]).trajectories[0].tokens.tolist()


def test_ranks_without_rollouts_know_whether_a_batch_waits(tmp_path):
    checkpoints = Checkpoints(tmp_path, Checkpoint(), steps=9)
    assert checkpoints.restore(Trainer(), Learner(), None) == (0, None, False)
    checkpoints.save(4, Trainer(), Learner(0.5), Rollouts(), None)
    learner = Learner()
    assert checkpoints.restore(Trainer(), learner, None) == (4, None, False)
    assert learner.kl_coef == 0.5
    checkpoints.save(5, Trainer(), Learner(), Rollouts(), [group(0, [1])])
    assert checkpoints.restore(Trainer(), Learner(), None) == (5, None, True)


def test_a_batch_of_which_the_filters_left_nothing_is_a_batch(tmp_path):
    checkpoints = Checkpoints(tmp_path, Checkpoint(), steps=9)
    checkpoints.save(5, Trainer(), Learner(), Rollouts(), [])
    assert checkpoints.restore(Trainer(), Learner(), Rollouts()) == (5, [], True)
