"""The step loop. Every trainer rank runs it; it is the definition of what a step is.

    colocated_sync      train(batch k) → push(v k+1) → ask(k+1) → collect(k+1)
    one_step_overlap    train(batch k) → collect(k+1) → push(v k+1) → ask(k+2)

Batch k is trained in step k and yields version k+1. At the push point: checkpoint → push → ask for evaluation → ask
for training. Only rank 0 talks to the rollout side (`rollouts`, `log`); on every other rank both are None. `turns` says
who has the memory of GPUs that trainers and engines share: the trainers for train and checkpoint, both in a push.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from mrl.cluster.checkpoints import Checkpoints
from mrl.cluster.gang import Orders, Scatter
from mrl.config.schema import Experiment
from mrl.engine.api import Version
from mrl.learner import Learner
from mrl.observe.clock import Clock
from mrl.observe.runlog import RunLog
from mrl.rollout.batch import check_versions, rollout_metrics
from mrl.rollout.service import RolloutService
from mrl.rollout.types import Group
from mrl.turns import Turns

if TYPE_CHECKING:  # what is tested around stand-ins needs no Megatron
    from mrl.stream.sync import WeightSync
    from mrl.trainer.trainer import Trainer


class StepLoop:
    """Wires the parts together; `run` is the training."""

    def __init__(self, experiment: Experiment, trainer: Trainer, sync: WeightSync, orders: Orders, scatter: Scatter,
                 checkpoints: Checkpoints, rollouts: RolloutService | None, log: RunLog | None, attempt: int,
                 turns: Turns, clock: Clock):
        self.experiment, self.trainer, self.sync, self.orders = experiment, trainer, sync, orders
        self.checkpoints, self.rollouts, self.log, self.attempt = checkpoints, rollouts, log, attempt
        self.overlap = experiment.loop.mode == "one_step_overlap"
        self.steps, self.step = experiment.loop.steps, 0
        self.groups: list[Group] | None = None  # the collected, untrained batch, whole; on rank 0
        self.turns, self.clock = turns, clock
        self.learner = Learner(experiment, trainer, scatter, clock)

    @property
    def version(self) -> Version:
        return Version(self.attempt, self.step)

    def run(self) -> None:
        """Train from the newest checkpoint, or from step 0, to `loop.steps`."""
        self.step, self.groups, has_batch = self.checkpoints.restore(self.trainer, self.learner, self.rollouts)
        self.push()
        self.ask_evaluation()
        if has_batch:
            self.share(lag=1)
        elif self.step < self.steps:
            self.ask(self.step)
            self.collect("gen", lag=0)
        if self.overlap:
            self.ask(self.step + 1)
        self.clock.lap()

        while self.step < self.steps:
            metrics = self.train()
            self.step += 1
            last = self.step == self.steps
            if self.overlap and not last:
                self.collect("wait_prev_gen", lag=1)
            if self.checkpoints.due(self.step):
                with self.clock("checkpoint"):
                    self.checkpoints.save(self.step, self.trainer, self.learner, self.rollouts, self.groups)
            self.push()
            self.ask_evaluation()
            self.ask(self.step + self.overlap)
            if not self.overlap and not last:
                self.collect("gen", lag=0)
            self.report(metrics)
        self.wait()  # for the last evaluation

    def train(self) -> dict[str, float]:
        """Train on the collected batch. Returns its metrics."""
        metrics = {}
        if self.rollouts:
            metrics = {**rollout_metrics(self.groups, self.version), **self.rollouts.batch_metrics}
        self.turns.to_train()
        metrics |= self.learner.train(self.step)
        self.groups = None
        return metrics

    def push(self, engines: list[int] | None = None) -> None:
        """Send the current weights to the engines named, or to all that do not have them yet."""
        self.turns.to_push()
        with self.clock("sync"):
            if self.rollouts and engines is None:
                engines = self.rollouts.without(self.version)
            self.trainer.gather_params()
            report = self.sync.push(self.version, engines)
        if self.rollouts:
            self.log.push(self.step, report)
            self.rollouts.pushed(self.version, report.errors)
        self.turns.to_generate()

    def ask(self, step: int) -> None:
        """Ask for training batch `step`, if the run has such a step."""
        if self.rollouts and step < self.steps:
            self.rollouts.ask_training(step, self.version)

    def ask_evaluation(self) -> None:
        every = self.experiment.eval.every
        if self.rollouts and every and (self.step % every == 0 or self.step == self.steps):
            self.rollouts.ask_evaluation(self.version)

    def collect(self, timing: str, lag: int) -> None:
        """Wait for the batch asked for, and deal it out; its weights must be `lag` steps old."""
        with self.clock(timing):
            self.wait()
            if self.rollouts:
                self.groups = self.rollouts.take("train")
            self.share(lag)

    def wait(self) -> None:
        """Wait for all that was asked for; meanwhile give the current weights to any engine that restarted."""
        while engines := self.orders.exchange(self.rollouts and self.rollouts.wait,
                                              self.experiment.loop.collect_timeout_s):
            self.push(None if self.turns.sleeps else engines)  # a push to some lets all sleep
        if self.rollouts and (evaluated := self.rollouts.take("eval")):
            self.log.evaluation(evaluated, self.experiment.eval, self.experiment.seed)

    def share(self, lag: int) -> None:
        if self.rollouts:
            check_versions(self.groups, self.version, lag)
            self.log.trajectories(f"step_{self.step:06d}", self.groups)
        self.learner.receive(self.groups if self.rollouts else None)

    def report(self, metrics: dict[str, float]) -> None:
        timings = {f"timing/{name}": seconds for name, seconds in self.clock.lap().items()}
        if self.log:
            self.log.step(self.step, {**metrics, **self.turns.metrics(), **timings})
