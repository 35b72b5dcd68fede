"""From groups to what the trainer eats: advantages, token weights, minibatches, microbatches. Pure, rank 0 only."""
from __future__ import annotations

from dataclasses import dataclass

import torch

from mrl.algorithm.advantages import group_advantages
from mrl.algorithm.weights import token_weights
from mrl.config.schema import Experiment
from mrl.engine.api import Version
from mrl.rollout.types import Group
from mrl.trainer.microbatch import Sample, assign

Microbatch = list[Sample]


@dataclass
class Batch:
    """One data-parallel replica's share of what a step trains on: minibatches of microbatches of samples."""

    minibatches: list[list[Microbatch]]

    def add_field(self, name: str, values: list[torch.Tensor]) -> None:
        """Give every sample the per-token field `name`; `values` in the order of `microbatches`."""
        samples = (sample for microbatch in self.microbatches for sample in microbatch)
        for sample, value in zip(samples, values, strict=True):
            sample[name] = value

    @property
    def microbatches(self) -> list[Microbatch]:
        return [microbatch for minibatch in self.minibatches for microbatch in minibatch]


def check_versions(groups: list[Group], current: Version, lag: int) -> None:
    """Every group must be exactly `lag` steps old; one regenerated after an engine was lost may be newer, never older.

    Raises RuntimeError naming the group and both versions.
    """
    for group in groups:
        age = current.step - group.version.step
        if age != lag and not (group.regenerated and 0 <= age < lag):
            raise RuntimeError(
                f"group {group.request.group_id} was sampled with weights {group.version} and would be trained at "
                f"{current}: it is {age} steps old where {lag} is promised")


def split_batch(groups: list[Group], experiment: Experiment, replicas: int) -> list[Batch]:
    """One Batch a data-parallel replica.

    A minibatch holds whole groups; its token weights sum to 1 over all replicas, so that no later split of it into
    microbatches can change the gradient. ValueError when the groups do not divide into minibatches.
    """
    batch, algorithm = experiment.batch, experiment.algorithm
    if len(groups) % batch.minibatches:
        raise ValueError(f"{len(groups)} groups do not divide into batch.minibatches = {batch.minibatches}")
    groups = sorted(groups, key=lambda group: group.request.group_id)
    trajectories = [t for group in groups for t in group.trajectories]
    ids = torch.tensor([group.request.group_id for group in groups for _ in group.trajectories])
    rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float32)
    advantages = group_advantages(rewards, ids, algorithm.std != "none")

    samples = [_sample(t, float(a)) for t, a in zip(trajectories, advantages)]
    size = len(groups) // batch.minibatches
    minibatch_of = [position // size for position, group in enumerate(groups) for _ in group.trajectories]
    weights = token_weights([s["loss_mask"] for s in samples], algorithm.aggregation, minibatch_of)
    for sample, weight in zip(samples, weights):
        sample["token_weight"] = weight

    shares = [Batch([]) for _ in range(replicas)]
    for minibatch in range(batch.minibatches):
        members = [sample for sample, own in zip(samples, minibatch_of) if own == minibatch]
        lengths = [len(sample["tokens"]) for sample in members]
        for share, microbatches in zip(shares, assign(lengths, replicas, batch.max_tokens_per_microbatch)):
            share.minibatches.append([[members[i] for i in indices] for indices in microbatches])
    return shares


def _sample(trajectory, advantage: float) -> Sample:
    mask = torch.from_numpy(trajectory.loss_mask.copy())
    return {
        "tokens": torch.from_numpy(trajectory.tokens.copy()),
        "loss_mask": mask,
        "rollout_log_prob": torch.from_numpy(trajectory.rollout_log_prob.copy()),
        "advantage": mask.float() * advantage,
    }


def rollout_metrics(groups: list[Group], current: Version) -> dict[str, float]:
    """What the sampled batch was like. `accuracy` is the share of samples with full marks (reward ≥ 1)."""
    trajectories = [t for group in groups for t in group.trajectories]
    rewards = [t.reward for t in trajectories]
    lengths = [t.response_length for t in trajectories]
    n = len(trajectories)
    return {
        "reward/mean": sum(rewards) / n,
        "reward/max": max(rewards),
        "reward/min": min(rewards),
        "reward/errors": sum(t.reward_error is not None for t in trajectories),
        "rollout/accuracy": sum(r >= 1 for r in rewards) / n,
        "rollout/response_length": sum(lengths) / n,
        "rollout/response_length_max": max(lengths),
        "rollout/truncated": sum(t.finish_reason == "length" for t in trajectories) / n,
        "rollout/groups_without_signal":
            sum(len({t.reward for t in group.trajectories}) == 1 for group in groups) / len(groups),
        "rollout/groups_regenerated": sum(g.regenerated for g in groups),
        "rollout/version_lag": sum(current.step - g.version.step for g in groups) / len(groups),
        "rollout/tokens": sum(lengths),
        "timing/generate_sequences": max(g.finished for g in groups) - min(g.started for g in groups),
    }
