"""Hand-made groups for the tests of this folder."""
import numpy as np

from mrl.engine.api import Version
from mrl.rollout.types import Group, GroupRequest, Trajectory


def trajectory(prompt=(5, 6), response=(7, 8, 9), reward=0.0, version=Version(0, 0), finish="stop", extracted=None):
    tokens = np.array([*prompt, *response], dtype=np.int64)
    mask = np.arange(len(tokens)) >= len(prompt)
    return Trajectory(tokens, mask, np.where(mask, np.float32(-0.5), np.float32(0)), version, finish, "text", reward,
                      correct=reward >= 1, extracted=extracted)


def group(group_id, rewards, lengths=None, version=Version(0, 0), regenerated=False, dataset=""):
    lengths = lengths or [3] * len(rewards)
    made = Group(GroupRequest(group_id, group_id, 0, len(rewards), "eval" if dataset else "train", dataset), "prompt",
                 "answer",
                 [trajectory(response=range(n), reward=r, version=version) for n, r in zip(lengths, rewards)])
    made.regenerated, made.started, made.finished = regenerated, 10.0, 12.0
    return made
