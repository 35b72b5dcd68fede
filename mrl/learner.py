"""What a step does with a collected batch: deals it out, adds the fields that the algorithm needs, makes advantages,
trains. Every trainer rank runs it; only rank 0 has the groups.

Advantages are made on rank 0 over the whole batch, by one function. Where they need nothing of the trainers it happens
before the batch is dealt out. Where they do (the KL of every token, values), each replica computes the fields of its
samples, rank 0 gathers them and deals the advantages out. So neither replicas nor microbatches can change one.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from mrl.algorithm.advantages import Estimate, estimate
from mrl.algorithm.kl import adapted_coef, kl_estimate
from mrl.algorithm.loss import finished, make_loss
from mrl.algorithm.value_loss import make_value_loss, value_metrics
from mrl.cluster.gang import Scatter
from mrl.config.schema import Experiment
from mrl.observe.clock import Clock
from mrl.rollout.batch import Batch, Split, split_batch
from mrl.rollout.types import Group

if TYPE_CHECKING:  # what is tested around a stand-in needs no Megatron
    from mrl.trainer.trained_model import TrainedModel
    from mrl.trainer.trainer import Trainer


class Learner:
    """One batch at a time: `receive`, then `train`. Collective."""

    def __init__(self, experiment: Experiment, trainer: Trainer, scatter: Scatter, clock: Clock):
        self.experiment, self.trainer, self.scatter, self.clock = experiment, trainer, scatter, clock
        self.algorithm, self.critic = experiment.algorithm, trainer.critic
        self.kl_coef = self.algorithm.kl.coef
        self.batch: Batch | None = None  # this replica's share
        self.split: Split | None = None  # on rank 0: who has what

    def state(self) -> dict[str, float]:
        """What a checkpoint must hold, the same on every rank."""
        return {"kl_coef": self.kl_coef}

    def restore(self, state: Mapping[str, float]) -> None:
        self.kl_coef = state["kl_coef"]

    def receive(self, groups: list[Group] | None) -> None:
        """Deal the batch out. `groups`: the whole of it on rank 0, None elsewhere."""
        shares = None
        if groups is not None:
            self.split = split_batch(groups, self.experiment, self.trainer.layout.replicas)
            if not self.algorithm.needs_trainer_fields:
                estimates = self.split.deal(estimate(self.algorithm, self.split.scored))
                for share, mine in zip(self.split.shares, estimates):
                    _add_estimates(share, mine)
            shares = self.split.shares
        self.batch = self.scatter(shares)

    def train(self, step: int) -> dict[str, float]:
        """Train on the batch of step `step`, if there is anything in it. Returns its metrics."""
        metrics, kl = self._train_on(self.batch, step) if self.batch.minibatches else {}, self.algorithm.kl
        self.batch, self.split = None, None
        if kl.reference_every and (step + 1) % kl.reference_every == 0:
            with self.clock("update_reference"):
                self.trainer.update_reference()
        return metrics

    def _train_on(self, batch: Batch, step: int) -> dict[str, float]:
        """Whatever the losses need, then the optimizer steps of the critic, if there is one, and of the policy."""
        metrics = {}
        self._add_log_probs(batch)
        if self.critic:
            metrics |= self._train_critic(batch)
        elif self.algorithm.needs_trainer_fields:
            self._add_advantages(batch)
        if step >= self.algorithm.critic.warmup_steps:
            metrics |= self._train_policy(batch)
        return metrics

    def _train_critic(self, batch: Batch) -> dict[str, float]:
        """Values, advantages from them, then the critic's optimizer steps."""
        with self.clock("update_critic"), self.critic.awake():
            with self.clock("values"):
                batch.add_field("value", self.critic.values(batch.microbatches))
            metrics = self._add_advantages(batch)
            updates = self._update(batch, self.critic, make_value_loss(self.algorithm.critic))
        return {**metrics, **_means("critic", updates)}

    def _train_policy(self, batch: Batch) -> dict[str, float]:
        """The policy's optimizer steps, then the KL coefficient of the next batch."""
        kl = self.algorithm.kl
        with self.clock("update_actor"):
            updates = [finished(update)
                       for update in self._update(batch, self.trainer, make_loss(self.algorithm, self.kl_coef))]
        metrics = _means("actor", updates)
        metrics["rollout/logprob_diff"] = updates[0]["logprob_diff"]  # later minibatches differ by design
        if kl.coef > 0:
            metrics["actor/kl_coef"] = self.kl_coef
            self.kl_coef = adapted_coef(self.kl_coef, metrics["actor/kl"], batch.total, kl)
        return metrics

    def _update(self, batch: Batch, model: TrainedModel, loss: Callable) -> list[dict[str, float]]:
        """All optimizer steps of one model on the batch: the metrics of each."""
        return [model.train(microbatches, loss)
                for _ in range(self.experiment.batch.epochs) for microbatches in batch.minibatches]

    def _add_log_probs(self, batch: Batch) -> None:
        """Proximal and reference log-probs of every token, as far as they are needed and not to be had for nothing."""
        shape, kl = self.experiment.batch, self.algorithm.kl
        several = shape.minibatches * shape.epochs > 1
        penalised = kl.coef > 0 and kl.place == "reward"
        if self.algorithm.old_log_prob == "recompute" and (several or penalised):
            with self.clock("old_log_prob"):
                batch.add_field("old_log_prob", self.trainer.log_probs(batch.microbatches))
        if kl.coef > 0:
            with self.clock("ref_log_prob"), self.trainer.use_reference():
                batch.add_field("ref_log_prob", self.trainer.log_probs(batch.microbatches))

    def _add_advantages(self, batch: Batch) -> dict[str, float]:
        """Advantages that depend on this replica's fields: over the whole batch on rank 0, and back.

        Returns, on rank 0, metrics of the critic's values.
        """
        kl, fields = self.algorithm.kl, {}
        if self.critic:
            fields["values"] = [sample["value"] for sample in batch.samples]
        if kl.coef > 0 and kl.place == "reward":
            old = "old_log_prob" if self.algorithm.old_log_prob == "recompute" else "rollout_log_prob"
            fields["penalty"] = [self.kl_coef * kl_estimate(sample[old], sample["ref_log_prob"], kl.estimator)
                                 for sample in batch.samples]
        with self.clock("advantages"):
            parts, dealt, metrics = self.scatter.gather(fields), None, {}
            if parts is not None:
                whole = {name: self.split.collect([part[name] for part in parts]) for name in fields}
                scored = [replace(sequence, **{name: values[index] for name, values in whole.items()})
                          for index, sequence in enumerate(self.split.scored)]
                estimates = estimate(self.algorithm, scored)
                dealt = self.split.deal(estimates)
                if self.critic:
                    metrics = value_metrics([s.values for s in scored], [e.returns for e in estimates],
                                            [s.mask for s in scored])
            _add_estimates(batch, self.scatter(dealt))
        return {f"critic/{name}": value for name, value in metrics.items()}


def _means(model: str, updates: list[dict[str, float]]) -> dict[str, float]:
    """Metrics over the optimizer steps of one model: the mean, or the largest of those that end in _max."""
    every = {name: [update[name] for update in updates] for name in updates[0]}
    return {f"{model}/{name}": max(values) if name.endswith("_max") else sum(values) / len(values)
            for name, values in every.items()}


def _add_estimates(batch: Batch, estimates: list[Estimate]) -> None:
    batch.add_field("advantage", [estimate.advantage for estimate in estimates])
    if estimates and estimates[0].returns is not None:
        batch.add_field("return", [estimate.returns for estimate in estimates])
