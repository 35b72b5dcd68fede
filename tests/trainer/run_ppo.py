"""Under torchrun: PPO with a critic on one batch, step after step. Arguments: model directory, then tp=2,… each.

The layouts must agree on every metric, since none of them may change a value, an advantage or a gradient.
"""
from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mrl.engine.api import Version
from mrl.observe.clock import Clock
from mrl.rollout.types import Group, GroupRequest
from tests.rollout.experiments import experiment
from tests.rollout.groups import trajectory
from tests.trainer.gang import gang, parse_parallel
from tests.trainer.tiny import VOCAB

STEPS, WARMUP, LAM = 6, 2, 0.9


def settings(model: Path, parallel: dict):
    return experiment(
        model={"path": str(model)},
        algorithm={"name": "gae", "gae": {"lam": LAM}, "old_log_prob": "recompute",
                   "critic": {"warmup_steps": WARMUP, "value_clip": 0.5, "offload": "pp" in parallel,
                              "optimizer": {"lr": 3e-3}}},
        batch={"prompts_per_step": 4, "minibatches": 2, "epochs": 2, "max_tokens_per_microbatch": 24},
        trainer={"parallel": parallel, "optimizer": {"lr": 1e-3}}, loop={"steps": STEPS})


def groups() -> list[Group]:
    """Four prompts with two answers each, of unequal lengths; that which begins with the larger token is right."""
    chance, made = random.Random(1), []
    for number in range(4):
        prompt = [chance.randrange(VOCAB) for _ in range(3)]
        answers = [[chance.randrange(VOCAB) for _ in range(length)] for length in (2 + number, 7 - number)]
        best = max(answer[0] for answer in answers)
        made.append(Group(GroupRequest(number, number, 0, 2, "train"), "prompt", "answer", [
            trajectory(prompt, answer, reward=float(answer[0] == best), version=Version(0, 0)) for answer in answers]))
    return made


def train(model: Path, parallel: dict, platform) -> list[dict[str, float]]:
    """The metrics of every step, the timings' names under "timings"; on rank 0 those of the values too."""
    from mrl.cluster.gang import Scatter
    from mrl.learner import Learner
    from mrl.trainer.trainer import Trainer

    chosen = settings(model, parallel)
    trainer = Trainer(chosen, platform, chosen.policy_updates)
    clock, rank, history = Clock(), dist.get_rank(), []
    learner = Learner(chosen, trainer, Scatter(trainer.layout, rank), clock)
    for step in range(STEPS):
        before = {name: param.clone() for name, param in trainer.local_params().items()}
        learner.receive(groups() if rank == 0 else None)
        history.append(learner.train(step))
        moved = any(not torch.equal(param, before[name]) for name, param in trainer.local_params().items())
        assert moved == (step >= WARMUP), step
        assert {"values", "update_critic", *(["update_actor"] if moved else [])} <= clock.lap().keys()
    assert trainer.optimizer.steps == chosen.policy_updates == (STEPS - WARMUP) * 4
    assert trainer.critic.optimizer.steps == STEPS * 4
    return history


def check_history(history: list[dict[str, float]]) -> None:
    first, last = history[0], history[-1]
    # Values start at 0, so that the advantage and the return k tokens before the last are λ^k times the reward.
    rewarded = [t for group in groups() for t in group.trajectories if t.reward]
    tokens = sum(t.response_length for group in groups() for t in group.trajectories)
    total = sum(LAM ** k for t in rewarded for k in range(t.response_length))
    assert first["critic/value"] == 0.0 and first["critic/return"] == pytest.approx(total / tokens, rel=1e-5)
    assert first["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert last["critic/explained_variance"] > 0.5, [step["critic/explained_variance"] for step in history]
    assert last["critic/value_loss"] < first["critic/value_loss"] / 2
    assert any(step["critic/clip_fraction"] > 0 for step in history)
    assert not any(name.startswith("actor/") for step in history[:WARMUP] for name in step)
    assert all(step["actor/update_skipped"] == 0 for step in history[WARMUP:])


def tolerance(step: int, name: str) -> dict[str, float]:
    """Adam makes a step of a gradient that is rounding noise, after which a value may lie on either side of a bound."""
    if step < WARMUP:
        return {"rel": 1e-4, "abs": 1e-6}
    return {"rel": 2e-2, "abs": 0.1 if name.endswith("clip_fraction") else 2e-3}


def main(model: Path, layouts: list[str]) -> None:
    with gang() as platform:
        histories = {words: train(model, parse_parallel(words), platform) for words in layouts}
        if dist.get_rank() == 0:
            for words, history in histories.items():
                check_history(history)
                for step, (mine, expected) in enumerate(zip(history, histories[layouts[0]])):
                    assert mine.keys() == expected.keys()
                    apart = {name: (value, expected[name]) for name, value in mine.items()
                             if value != pytest.approx(expected[name], **tolerance(step, name))}
                    assert not apart, (words, step, apart)
                print(f"ok {words}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
