"""The critic's loss by hand: clipping, masks, and the share of the returns' variance that values explain."""
from __future__ import annotations

import pytest
import torch

from mrl.algorithm.value_loss import make_value_loss, value_loss, value_metrics
from mrl.config.algorithm import Critic


def test_hand_values():
    values = torch.tensor([1.0, 1.0, 1.0, 1.0], requires_grad=True)
    old = torch.tensor([0.9, 0.5, 0.5, 1.0])
    returns = torch.tensor([2.0, 2.0, 0.0, 1.0])
    loss, clipped = value_loss(values, old, returns, clip=0.2)
    # 0.5 (2-1)²; moved towards the return by .5: 0.5 (2-.7)²; moved away: 0.5 (1-0)²; at its return: 0
    torch.testing.assert_close(loss, torch.tensor([0.5, 0.845, 0.5, 0.0]))
    assert clipped.tolist() == [False, True, False, False]
    loss.sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([-1.0, 0.0, 1.0, 0.0]))


def test_without_clipping_it_is_half_the_squared_error():
    loss, clipped = value_loss(torch.tensor([3.0]), torch.tensor([-5.0]), torch.tensor([1.0]), clip=None)
    assert loss.tolist() == [2.0] and not clipped.any()


def test_masked_positions_reach_neither_loss_nor_gradient():
    values = torch.tensor([1.0, torch.nan, 2.0], requires_grad=True)
    fields = {"loss_mask": torch.tensor([True, False, True]), "mean_weight": torch.tensor([0.25, torch.nan, 0.75]),
              "value": torch.tensor([1.0, torch.nan, 2.0]), "return": torch.tensor([3.0, torch.inf, 2.0])}
    loss, metrics = make_value_loss(Critic(value_clip=0.5))(values, fields)
    loss.backward()
    assert float(loss) == 0.25 * 2.0 and float(metrics["clip_fraction"]) == 0.0
    assert values.grad.tolist() == [-0.5, 0.0, 0.0]


def test_it_does_not_depend_on_the_split():
    torch.manual_seed(0)
    fields = {"loss_mask": torch.rand(20) > 0.3, "mean_weight": torch.rand(20), "value": torch.randn(20),
              "return": torch.randn(20)}
    values, loss_fn = torch.randn(20), make_value_loss(Critic(value_clip=0.3))
    whole = loss_fn(values, fields)[1]
    parts = [loss_fn(values[at], {name: field[at] for name, field in fields.items()})[1]
             for at in (slice(0, 7), slice(7, 7), slice(7, 20))]
    assert 0 < float(whole["clip_fraction"])
    for name, value in whole.items():
        torch.testing.assert_close(sum(part[name] for part in parts), value)


@pytest.mark.parametrize(("values", "expected"), [
    ([1.0, 2.0, 3.0], 1.0), ([7.0, 7.0, 7.0], 0.0), ([3.0, 2.0, 1.0], -3.0)])
def test_explained_variance(values, expected):
    mask = torch.tensor([True, True, False, True])
    values = torch.tensor([*values[:2], torch.nan, values[2]])
    returns = torch.tensor([1.0, 2.0, torch.nan, 3.0])
    for times in (1, 2):
        metrics = value_metrics([values] * times, [returns] * times, [mask] * times)
        assert metrics["explained_variance"] == pytest.approx(expected) and metrics["return"] == 2.0


def test_nothing_to_explain_is_no_nan():
    one = [torch.ones(2)]
    same = value_metrics(one, one, [torch.ones(2, dtype=torch.bool)])
    assert same == {"value": 1.0, "return": 1.0, "explained_variance": 0.0}
    assert set(value_metrics(one, one, [torch.zeros(2, dtype=torch.bool)]).values()) == {0.0}
