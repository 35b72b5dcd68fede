"""From groups to what the trainer eats: token weights, minibatches, microbatches, and who gets them. Pure."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from mrl.algorithm.advantages import Scored
from mrl.algorithm.filters import all_equal
from mrl.algorithm.weights import token_weights
from mrl.config.schema import Experiment
from mrl.engine.api import Version
from mrl.rollout.types import Group, Trajectory
from mrl.trainer.microbatch import Sample, assign

Microbatch = list[Sample]
T = TypeVar("T")


@dataclass
class Batch:
    """One data-parallel replica's share of what a step trains on: minibatches of microbatches of samples.

    total: samples of the whole batch, over all replicas.
    """

    minibatches: list[list[Microbatch]]
    total: int

    def add_field(self, name: str, values: list[torch.Tensor]) -> None:
        """Give every sample the per-token field `name`; `values` in the order of `microbatches`."""
        for sample, value in zip(self.samples, values, strict=True):
            sample[name] = value

    @property
    def samples(self) -> list[Sample]:
        return [sample for microbatch in self.microbatches for sample in microbatch]

    @property
    def microbatches(self) -> list[Microbatch]:
        return [microbatch for minibatch in self.minibatches for microbatch in minibatch]

    def __getstate__(self) -> dict[str, Any]:
        """One tensor a field: pickled one by one, the tensors of a few hundred samples take most of a second."""
        samples = self.samples
        names = samples[0].keys() if samples else ()
        return {
            "total": self.total,
            "sizes": [[len(microbatch) for microbatch in minibatch] for minibatch in self.minibatches],
            "lengths": [len(sample["tokens"]) for sample in samples],
            "fields": {name: torch.cat([sample[name] for sample in samples]) for name in names},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        columns = {name: flat.split(state["lengths"]) for name, flat in state["fields"].items()}
        samples = iter([dict(zip(columns, values)) for values in zip(*columns.values(), strict=True)])
        self.total = state["total"]
        self.minibatches = [[[next(samples) for _ in range(size)] for size in sizes] for sizes in state["sizes"]]


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


@dataclass
class Split:
    """A batch dealt out to data-parallel replicas, as rank 0 sees it."""

    shares: list[Batch]
    """One a replica."""
    scored: list[Scored]
    """What advantages depend on, of every sample, in the order of group ids."""
    places: list[list[int]]
    """By replica, for each sample in the order of its microbatches: its index in `scored`."""

    def deal(self, values: Sequence[T]) -> list[list[T]]:
        """One value a sample, in the order of `scored` -> by replica, in the order of its microbatches."""
        return [[values[index] for index in places] for places in self.places]

    def collect(self, parts: Sequence[Sequence[T]]) -> list[T]:
        """The reverse of `deal`."""
        found = {index: value for places, part in zip(self.places, parts, strict=True)
                 for index, value in zip(places, part, strict=True)}
        return [found[index] for index in range(len(self.scored))]


def split_batch(groups: list[Group], experiment: Experiment, replicas: int) -> Split:
    """Samples with their token weights, cut into minibatches and microbatches, and dealt out to replicas.

    A minibatch holds whole groups; its token weights are made over all replicas, so that no later split of it into
    microbatches can change the gradient. Groups that batch.minibatches does not divide make minibatches that differ by
    one group; fewer groups than that make as many minibatches as there are groups, and no groups make none.
    """
    batch = experiment.batch
    minibatches = min(batch.minibatches, len(groups))
    groups = sorted(groups, key=lambda group: group.request.group_id)
    sampled = [(group, t) for group in groups for t in group.trajectories]
    samples = [_sample(t, experiment.reward.overlong.mask_truncated) for _, t in sampled]
    scored = [Scored(group.request.group_id, t.shaped_reward, mask=sample["loss_mask"],
                     baseline=group.baseline_reward, divergence=_divergence(t))
              for (group, t), sample in zip(sampled, samples)]
    minibatch_of = [position * minibatches // len(groups) for position, group in enumerate(groups)
                    for _ in group.trajectories]
    _weigh(samples, minibatch_of, [s.group for s in scored], experiment)

    split = Split([Batch([], len(samples)) for _ in range(replicas)], scored, [[] for _ in range(replicas)])
    for minibatch in range(minibatches):
        members = [index for index, own in enumerate(minibatch_of) if own == minibatch]
        lengths = [len(samples[index]["tokens"]) for index in members]
        dealt = assign(lengths, replicas, batch.max_tokens_per_microbatch)
        for share, places, microbatches in zip(split.shares, split.places, dealt):
            share.minibatches.append([[samples[members[i]] for i in indices] for indices in microbatches])
            places += [members[i] for indices in microbatches for i in indices]
    return split


def _sample(trajectory: Trajectory, mask_truncated: bool) -> Sample:
    mask = torch.from_numpy(trajectory.loss_mask.copy())
    if mask_truncated and trajectory.finish_reason == "length":
        mask = torch.zeros_like(mask)
    return {
        "tokens": torch.from_numpy(trajectory.tokens.copy()),
        "loss_mask": mask,
        "rollout_log_prob": torch.from_numpy(trajectory.rollout_log_prob.copy()),
        **({} if trajectory.experts is None else {"experts": torch.from_numpy(trajectory.experts.copy())}),
    }


def _divergence(trajectory: Trajectory) -> torch.Tensor | None:
    """log p of each token by the weights that sampled it, less the teacher's: f32[T], 0 at masked tokens."""
    if trajectory.teacher_log_prob is None:
        return None
    return torch.from_numpy(trajectory.rollout_log_prob - trajectory.teacher_log_prob)


def _weigh(samples: list[Sample], minibatch_of: list[int], group_of: list[int], experiment: Experiment) -> None:
    """Add the field token_weight, by which losses are summed, and mean_weight, by which metrics are averaged."""
    masks, algorithm = [sample["loss_mask"] for sample in samples], experiment.algorithm
    constant = algorithm.constant_tokens or experiment.rollout.sampling.max_response_tokens
    weights = token_weights(masks, algorithm.aggregation, minibatch_of, group_of, constant)
    shares = token_weights(masks, "token_mean", minibatch_of)
    for sample, weight, share in zip(samples, weights, shares):
        sample["token_weight"], sample["mean_weight"] = weight, share


def distillation_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """How far the student is from its teacher: the mean over sampled tokens of log p - log p(teacher), an unbiased
    estimate of KL(student || teacher) of a token, in nats. Nothing without a teacher."""
    taught = [t for t in trajectories if t.teacher_log_prob is not None]
    tokens = sum(t.response_length for t in taught)
    total = sum(float((t.rollout_log_prob - t.teacher_log_prob).sum(dtype="float64")) for t in taught)
    return {"distill/reverse_kl": total / tokens} if tokens else {}


def seconds_taught(groups: Sequence[Group]) -> dict[str, float]:
    """How long the teacher had something to do: the length of the union of its times with the groups. Nothing without
    a teacher."""
    spans = sorted(group.taught for group in groups if group.taught)
    total, reached = 0.0, 0.0
    for begun, ended in spans:
        total += max(0.0, ended - max(begun, reached))
        reached = max(reached, ended)
    return {"timing/teach_sequences": total} if spans else {}


def rollout_metrics(groups: list[Group], current: Version) -> dict[str, float]:
    """What the sampled batch was like; {} for an empty one.

    `accuracy` is the share of samples that are right (`reward.accuracy`). Rewards are the graders', without the
    overlong penalty; reward/<part>: mean score of a part, before its weight; reward/errors: samples that a part could
    not score.
    """
    if not groups:
        return {}
    trajectories = [t for group in groups for t in group.trajectories]
    rewards = [t.reward for t in trajectories]
    lengths = [t.response_length for t in trajectories]
    n = len(trajectories)
    return {
        "reward/mean": sum(rewards) / n,
        "reward/max": max(rewards),
        "reward/min": min(rewards),
        **{f"reward/{part}": sum(t.reward_parts[part] for t in trajectories) / n
           for part in trajectories[0].reward_parts},
        "reward/errors": sum(t.reward_error is not None for t in trajectories),
        "reward/overlong_penalty": sum(t.overlong_penalty for t in trajectories) / n,
        "rollout/accuracy": sum(t.correct for t in trajectories) / n,
        "rollout/response_length": sum(lengths) / n,
        "rollout/response_length_max": max(lengths),
        "rollout/truncated": sum(t.finish_reason == "length" for t in trajectories) / n,
        "rollout/groups_without_signal":
            sum(all_equal([t.shaped_reward for t in group.trajectories]) for group in groups) / len(groups),
        "rollout/groups_regenerated": sum(g.regenerated for g in groups),
        "rollout/version_lag": sum(current.step - g.version.step for g in groups) / len(groups),
        "rollout/tokens": sum(lengths),
        **distillation_metrics(trajectories),
        "timing/generate_sequences": max(g.finished for g in groups) - min(g.started for g in groups),
        **seconds_taught(groups),
    }
