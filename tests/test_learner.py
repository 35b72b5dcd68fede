"""The learner around a stand-in for the trainer: which passes it makes, what reaches the loss, what it remembers."""
from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from mrl.learner import Learner
from mrl.observe.clock import Clock
from mrl.reshard.layout import Layout
from tests.rollout.experiments import experiment
from tests.rollout.groups import group, trajectory

ACTOR, REFERENCE = -0.5, -0.75
"""Log-prob of every token by either set of parameters; the engine's is -0.5 too."""


class Trainer:
    """Counts what it is asked for. Its loss is that of the actor's constant log-probs."""

    layout, critic = Layout(), None

    def __init__(self):
        self.calls: list[str] = []
        self.inside = "actor"
        self.samples: list[dict] = []

    def gather_params(self):
        self.calls.append("gather_params")

    def log_probs(self, microbatches):
        self.calls.append(f"log_probs {self.inside}")
        value = ACTOR if self.inside == "actor" else REFERENCE
        return [torch.full((len(s["tokens"]),), value) for m in microbatches for s in m]

    @contextmanager
    def use_reference(self):
        self.inside = "reference"
        yield
        self.inside = "actor"

    def update_reference(self):
        self.calls.append("update_reference")

    def train(self, microbatches, loss_fn):
        self.calls.append("train")
        self.samples = [s for m in microbatches for s in m]
        fields = {name: torch.cat([s[name] for s in self.samples]) for name in self.samples[0]}
        lengths = torch.tensor([len(s["tokens"]) for s in self.samples])
        fields["sequence"] = torch.arange(len(lengths)).repeat_interleave(lengths)
        log_probs = torch.full((int(lengths.sum()),), ACTOR)
        loss, metrics = loss_fn(log_probs, torch.zeros_like(log_probs), fields)
        return {"loss": loss.item(), **{name: value.item() for name, value in metrics.items()}}


class Scatter:
    """Of one replica."""

    def __call__(self, shares):
        return shares[0]

    def gather(self, part):
        return [part]


def learn(algorithm: dict, steps: int = 1, count: int = 2, **sections):
    """The trainer after so many steps on `count` groups of rewards 1 and 0, the learner, and the last metrics."""
    trainer = Trainer()
    learner = Learner(experiment(algorithm=algorithm, **sections), trainer, Scatter(), Clock())
    for step in range(steps):
        trainer.calls.clear()
        groups = [group(number, [1, 0]) for number in range(count)]
        for made in groups:
            made.baseline = trajectory(reward=0.25)
        learner.receive(groups)
        metrics = learner.train(step)
    return trainer, learner, metrics


@pytest.mark.parametrize("algorithm, batch, calls", [
    ({}, {}, ["train"]),
    ({"old_log_prob": "recompute"}, {}, ["train"]),
    ({"old_log_prob": "recompute"}, {"minibatches": 2}, ["log_probs actor", "train", "train"]),
    ({"old_log_prob": "recompute"}, {"epochs": 2}, ["log_probs actor", "train", "train"]),
    ({"kl": {"coef": 0.1}}, {}, ["log_probs reference", "train"]),
    ({"kl": {"coef": 0.1, "place": "reward"}}, {}, ["log_probs reference", "train"]),
    ({"old_log_prob": "recompute", "kl": {"coef": 0.1, "place": "reward"}}, {},
     ["log_probs actor", "log_probs reference", "train"]),
    ({"kl": {"coef": 0.1, "reference_every": 1}}, {}, ["log_probs reference", "train", "update_reference"]),
])
def test_no_pass_more_than_needed(algorithm, batch, calls):
    assert learn(algorithm, batch=batch)[0].calls == calls


@pytest.mark.parametrize("algorithm, first", [
    ({"std": "none"}, 0.5), ({"name": "rloo"}, 1.0), ({"name": "remax"}, 0.75)])
def test_advantages_reach_the_samples(algorithm, first):
    samples = learn(algorithm)[0].samples
    assert sorted(float(s["advantage"].max()) for s in samples)[-2:] == [first] * 2
    assert all(torch.equal(s["advantage"] != 0, s["loss_mask"]) for s in samples)


def test_the_kl_comes_off_the_reward():
    algorithm = {"name": "reinforce_plus_plus", "whiten": False,
                 "kl": {"coef": 0.1, "estimator": "k1", "place": "reward"}}
    trainer, _, metrics = learn(algorithm)
    # k1 is 0.25 at each of three tokens.
    torch.testing.assert_close(trainer.samples[0]["advantage"], torch.tensor([0, 0, 0.925, 0.95, 0.975]))
    assert metrics["actor/kl"] == pytest.approx(0.25) and metrics["actor/policy_loss"] == metrics["actor/loss"]


def test_the_coefficient_adapts_step_by_step_and_is_remembered():
    kl = {"coef": 0.1, "estimator": "k1", "place": "reward", "target": 1.0, "horizon": 100}
    _, learner, metrics = learn({"kl": kl}, steps=2)
    # The KL of 0.25 is below the target by more than 20 %; 4 samples a step.
    factor = 1 - 0.2 * 4 / 100
    assert metrics["actor/kl_coef"] == pytest.approx(0.1 * factor)
    assert learner.state() == {"kl_coef": pytest.approx(0.1 * factor ** 2)}
    resumed = Learner(learner.experiment, Trainer(), Scatter(), Clock())
    resumed.restore(learner.state())
    assert resumed.kl_coef == learner.kl_coef


def test_a_batch_that_stayed_short_moves_the_coefficient_by_the_samples_it_has():
    kl = {"coef": 0.1, "estimator": "k1", "place": "reward", "target": 1.0, "horizon": 100}
    _, learner, _ = learn({"kl": kl}, count=1)
    assert learner.kl_coef == pytest.approx(0.1 * (1 - 0.2 * 2 / 100))


@pytest.mark.parametrize("steps, updated", [(1, False), (2, False), (3, True), (4, False), (6, True)])
def test_the_reference_follows_every_so_many_steps(steps, updated):
    trainer = learn({"kl": {"coef": 0.1, "reference_every": 3}}, steps=steps)[0]
    assert ("update_reference" in trainer.calls) == updated


def test_metrics_of_several_updates():
    metrics = learn({}, batch={"minibatches": 2})[2]
    assert metrics["rollout/logprob_diff"] == 0.0 and metrics["actor/ratio"] == 1.0
    assert "actor/kl" not in metrics


def test_an_empty_batch_trains_nothing_and_still_renews_the_reference():
    trainer = Trainer()
    learner = Learner(experiment(algorithm={"kl": {"coef": 0.1, "reference_every": 2}}), trainer, Scatter(), Clock())
    for step in (0, 1):
        learner.receive([])
        assert learner.train(step) == {}
    assert trainer.calls == ["update_reference"]
