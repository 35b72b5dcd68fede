"""What travels between the step loop and the rollout workers: requests for groups, and the groups they become."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from mrl.engine.api import Version

Kind = Literal["train", "eval"]


@dataclass(frozen=True)
class GroupRequest:
    """One prompt to be sampled `samples` times. `group_id` is unique within its kind and survives a resume.

    dataset: of kind eval, the name in eval.datasets that `prompt_index` counts the prompts of; else empty.
    baseline: sample it once more, greedily, for an advantage that compares with that (ReMax).
    """

    group_id: int
    prompt_index: int
    step: int
    samples: int
    kind: Kind
    dataset: str = ""
    baseline: bool = False


@dataclass
class Trajectory:
    """One sampled episode. In every per-token array, the value at index t belongs to token t.

    tokens: int64 [T], prompt then response; loss_mask: bool [T], True where the token was sampled;
    rollout_log_prob: float32 [T], the engine's log-probability of a sampled token, 0 elsewhere;
    teacher_log_prob: float32 [T], the teacher's log-probability of a sampled token, 0 elsewhere; None without one;
    experts: int16 [T, layers with experts, experts a token], which the engine chose, -1 for a token whose choice is not
    known: the last; None where they are not replayed;
    finish_reason: "stop", or "length" where the response was cut off; extracted: the answer that the reward found;
    reward: the weighted sum of reward_parts (scores by name of the part); correct: whether it has full marks in those
    that judge; reward_error: what went wrong in scoring;
    overlong_penalty: <= 0, for a training response close to the longest.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    rollout_log_prob: np.ndarray
    version: Version
    finish_reason: str
    response_text: str
    reward: float = 0.0
    correct: bool = False
    reward_error: str | None = None
    extracted: str | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    overlong_penalty: float = 0.0
    teacher_log_prob: np.ndarray | None = None
    experts: np.ndarray | None = None

    @property
    def shaped_reward(self) -> float:
        """What advantages are made from: the graders' reward with the penalty."""
        return self.reward + self.overlong_penalty

    @property
    def response_length(self) -> int:
        return int(self.loss_mask.sum())


@dataclass
class Group:
    """All samples of one prompt, every one of them sampled from the same weight version.

    regenerated: an engine was lost while the group was sampled; samples were made again, perhaps by newer weights.
    baseline: the greedy sample that ReMax compares with; it is not trained on.
    started, finished: wall clock, seconds since the epoch; taught: likewise, when the teacher was first asked about its
    samples, and when it had answered about all. subset: the subset of its data set that it belongs to.
    """

    request: GroupRequest
    prompt_text: str
    answer: str
    trajectories: list[Trajectory] = field(default_factory=list)
    regenerated: bool = False
    baseline: Trajectory | None = None
    started: float = 0.0
    finished: float = 0.0
    taught: tuple[float, float] | None = None
    subset: str = ""

    @property
    def baseline_reward(self) -> float | None:
        """The greedy sample's reward, with its overlong penalty; None: there is none."""
        return self.baseline and self.baseline.shaped_reward

    @property
    def accuracy(self) -> float:
        """Share of its samples that are right."""
        return sum(t.correct for t in self.trajectories) / len(self.trajectories)

    @property
    def version(self) -> Version:
        return self.trajectories[0].version
