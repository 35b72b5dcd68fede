"""The drawing of one training step: which prompts are sampled, and which of their groups make the batch. Pure: no Ray.

The batch is the first `batch.prompts_per_step` groups, in the order of the prompts, that the filters keep. As soon as
one is rejected the next prompt is drawn, with nothing to wait for in between. The order in which groups happen to
finish decides nothing, so the same samples make the same batch with any number of engines and workers.
"""
from __future__ import annotations

from typing import Optional

from mrl.algorithm.filters import REJECTIONS, rejection
from mrl.config.schema import Experiment
from mrl.engine.api import Version
from mrl.rollout.types import Group, GroupRequest


class StepDraw:
    """What has been drawn for step `step` so far, and what became of it. `version`: what the engines serve."""

    def __init__(self, experiment: Experiment, step: int, version: Version):
        rollout = experiment.rollout
        self.step, self.version, self.filters = step, version, rollout.filters
        self.needed, self.extra = experiment.batch.prompts_per_step, rollout.oversample
        self.limit = self.needed * rollout.dynamic_sampling.max_gen_batches
        self.requests: list[GroupRequest] = []  # in the order of the prompts
        self.kept: dict[int, Group] = {}  # by group id, as `rejected` and `accuracy`
        self.rejected: dict[int, str] = {}
        self.accuracy: dict[int, float] = {}

    def wanted(self) -> int:
        """How many more prompts to draw now: those that make up for the groups rejected, within the limit."""
        if self.consumed is not None:
            return 0
        hopeful = len(self.requests) - len(self.rejected)
        return max(0, min(self.needed + self.extra - hopeful, self.limit - len(self.requests)))

    def add(self, group: Group) -> None:
        """Note a finished group."""
        rewards, number = [t.reward for t in group.trajectories], group.request.group_id
        self.accuracy[number] = group.accuracy
        if reason := rejection(rewards, group.accuracy, self.filters):
            self.rejected[number] = reason
        else:
            self.kept[number] = group

    @property
    def consumed(self) -> Optional[int]:
        """How many of the prompts the batch took, the rejected ones among them included; None: not settled yet."""
        kept = 0
        for count, request in enumerate(self.requests, start=1):
            if request.group_id not in self.accuracy:
                return None
            kept += request.group_id in self.kept
            if kept == self.needed:
                return count
        return len(self.requests) if len(self.requests) == self.limit else None

    def used(self) -> list[GroupRequest]:
        """The prompts that the batch took; once settled."""
        return self.requests[:self.consumed]

    def not_needed(self) -> list[GroupRequest]:
        """The prompts drawn beyond them, finished or not: the next step draws them again. Once settled."""
        return self.requests[self.consumed:]

    def batch(self) -> list[Group]:
        """The groups to train on, in the order of the prompts; fewer than needed when the limit was reached."""
        return [self.kept[request.group_id] for request in self.used() if request.group_id in self.kept]

    def metrics(self) -> dict[str, float]:
        """How the batch came about; once settled. Rejected groups are those among the prompts used."""
        used = self.used()
        reasons = [self.rejected[request.group_id] for request in used if request.group_id in self.rejected]
        return {
            **{f"filters/{reason}": reasons.count(reason) for reason in REJECTIONS},
            "filters/accuracy_before": sum(self.accuracy[request.group_id] for request in used) / len(used),
            "filters/refills": max(0, len(used) - self.needed),
            "filters/groups_missing": self.needed - (len(used) - len(reasons)),
            "filters/prompts_used": 1 - len(reasons) / len(used),
            "filters/prompts_not_needed": len(self.requests) - len(used),
            "filters/prompts_passed_over": used[-1].group_id + 1 - used[0].group_id - len(used),
        }
