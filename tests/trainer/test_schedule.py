"""The learning rate of every step, as the run sees it."""
from __future__ import annotations

from types import SimpleNamespace

import pytest

from mrl.config.optimizer import Optimizer
from mrl.platform import get_platform


@pytest.mark.parametrize("section, total, expected", [
    ({"warmup_steps": 2}, 4, [0.5, 1, 1, 1]),
    ({"warmup_steps": 4}, 2, [0.25, 0.5]),
    ({"schedule": "linear"}, 3, [0.75, 0.5, 0.25]),
    ({"schedule": "linear", "warmup_steps": 1, "min_lr": 0.5}, 3, [1, 1 - 0.5 / 3, 1 - 1 / 3]),
])
def test_learning_rates(section, total, expected):
    get_platform("cpu").install()
    from mrl.trainer.optimizer import _schedule

    optimizer = SimpleNamespace(param_groups=[{"lr": 0.0, "weight_decay": 0.0}])
    schedule = _schedule(optimizer, Optimizer(lr=1.0, **section), total)
    rates = []
    for _ in range(total):
        schedule.step(increment=1)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx(expected)
