"""Under torchrun: what a learner makes of one batch, under several layouts. Arguments: folder, then family:tp=2,… each.

Every layout and split must give the loss, the logged means and the gradients of tests/trainer/batches.py.
"""
from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mrl.config.schema import Experiment
from mrl.rollout.types import Group
from tests.trainer.batches import ALGORITHMS
from tests.trainer.gang import experiment, gang, parse_parallel, whole_gradients
from tests.trainer.run_layouts import clone, measure

SPLITS = (200, False), (31, True)
"""Token budget of a microbatch; whether the groups arrive in reverse."""


def learn(trainer, exp: Experiment, groups: list[Group]) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Metrics and gradients of one step of the learner, which leaves the parameters as they are."""
    from mrl.cluster.gang import Scatter
    from mrl.learner import Learner
    from mrl.observe.clock import Clock

    gradients: dict[str, torch.Tensor] = {}
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda: (gradients.update(clone(whole_gradients(trainer))), measure(trainer))[1]
    learner = Learner(exp, trainer, Scatter(trainer.layout, dist.get_rank()), Clock())
    learner.receive(groups if dist.get_rank() == 0 else None)
    metrics = learner.train(0)
    trainer.optimizer.step = step
    return {name.removeprefix("actor/"): value for name, value in metrics.items()}, gradients


def compare(name: str, metrics: dict, gradients: dict, means: dict, truth: dict) -> None:
    for theirs, ours in {"loss": "loss", "policy_loss": "policy_loss", "entropy": "entropy", "ratio": "ratio",
                         "kl": "kl", "logprob_diff": "logprob_diff", "weight": "importance_weight",
                         "cut": "importance_cut", "ess": "importance_ess", "largest": "importance_max"}.items():
        if ours in metrics:
            assert metrics[ours] == pytest.approx(means[theirs], rel=1e-4, abs=1e-5), (name, ours)
    if dist.get_rank():
        return
    assert gradients.keys() == truth.keys()
    for tensor, wanted in truth.items():
        error = float((gradients[tensor] - wanted).norm() / wanted.norm().clamp(min=1e-9))
        assert error <= 2e-5, f"{name}: {tensor}: relative error {error:.2e}"


def check(folder: Path, cases: list[str]) -> None:
    with gang() as platform:
        from mrl.reshard.load import load_hf
        from mrl.trainer.trainer import Trainer

        for number, case in enumerate(cases):
            family, _, words = case.partition(":")
            began, parallel = time.perf_counter(), parse_parallel(words)
            truth = torch.load(folder / f"learned_{family}.pt", weights_only=False)
            trainer = Trainer(experiment(folder / family, parallel, {"kl": {"coef": 0.1}}), platform, total_steps=9)
            load_hf(folder / "other" / family, trainer.local_params(), trainer.plans, trainer.spec)
            trainer.update_reference()
            load_hf(folder / family, trainer.local_params(), trainer.plans, trainer.spec)
            for turn, (name, algorithm) in enumerate(ALGORITHMS.items(), start=number):
                budget, backwards = SPLITS[turn % 2]  # every algorithm meets both
                exp = experiment(folder / family, parallel, algorithm, {"max_tokens_per_microbatch": budget})
                groups = truth["groups"][::-1] if backwards else truth["groups"]
                compare(f"{name} {case} {budget}", *learn(trainer, exp, groups), *truth["expected"][name])
            if dist.get_rank() == 0:
                print(f"ok {case} {time.perf_counter() - began:.1f}s", flush=True)


if __name__ == "__main__":
    check(Path(sys.argv[1]), sys.argv[2:])
