"""Per-token loss terms against values worked out by hand, and their gradients at the extremes."""
import math

import pytest
import torch

from mrl.algorithm.losses import importance_weights, kl_penalty, policy_loss, safe_exp


def gradient(function, x):
    x = torch.tensor([x], requires_grad=True)
    function(x).sum().backward()
    return x.grad.item()


@pytest.mark.parametrize("ratio, advantage, loss, is_clipped", [
    (1.0, 1.0, -1.0, False),
    (1.1, 1.0, -1.1, False),
    (1.5, 1.0, -1.2, True),      # the gain is bounded
    (0.5, 1.0, -0.5, False),     # a fallen good token is pulled back up
    (1.5, -1.0, 1.5, False),     # a risen bad token is pushed back down
    (0.5, -1.0, 0.8, True),
    (1.5, 0.0, 0.0, False),
])
def test_clipped_ratio_by_hand(ratio, advantage, loss, is_clipped):
    log_prob = torch.tensor([-1.0 + math.log(ratio)], requires_grad=True)
    value, got_ratio, clipped = policy_loss(log_prob, torch.tensor([-1.0]), torch.tensor([advantage]), 0.2, 0.2)
    assert value.item() == pytest.approx(loss, abs=1e-6)
    assert got_ratio.item() == pytest.approx(ratio, abs=1e-6) and not got_ratio.requires_grad
    assert clipped.item() is is_clipped
    value.sum().backward()
    assert log_prob.grad.item() == pytest.approx(0.0 if is_clipped else -ratio * advantage, abs=1e-6)


def test_the_bounds_may_differ():
    log_prob = torch.log(torch.tensor([1.5, 0.5]))
    value, _, _ = policy_loss(log_prob, torch.zeros(2), torch.tensor([1.0, -1.0]), clip_low=0.2, clip_high=0.28)
    torch.testing.assert_close(value, torch.tensor([-1.28, 0.8]))


def test_a_ratio_that_would_overflow_stays_finite():
    log_prob = torch.tensor([0.0, 0.0], requires_grad=True)
    value, _, _ = policy_loss(log_prob, torch.tensor([-500.0, -500.0]), torch.tensor([0.0, -1.0]), 0.2, 0.2)
    value.sum().backward()
    assert torch.isfinite(value).all() and torch.isfinite(log_prob.grad).all()
    assert value[0] == 0 and log_prob.grad[1] > 0


@pytest.mark.parametrize("estimator, expected", [("k1", 0.6931), ("k2", 0.2402), ("k3", 0.1931)])
def test_kl_estimators_at_half_and_quarter(estimator, expected):
    value = kl_penalty(torch.log(torch.tensor([0.5])), torch.log(torch.tensor([0.25])), estimator)
    assert value.item() == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("estimator, slope", [
    ("k1", lambda d: 1.0), ("k2", lambda d: d), ("k3", lambda d: 1.0 - math.exp(-d))])
@pytest.mark.parametrize("drift", [-5.0, -1.5, -0.5, -1e-3, 1e-3, 0.5, 1.5, 5.0, 50.0])
def test_kl_gradients(estimator, slope, drift):
    got = gradient(lambda x: kl_penalty(x, torch.zeros(1), estimator), drift)
    assert got == pytest.approx(slope(drift), rel=1e-4)


@pytest.mark.parametrize("drift", [-15.0, -25.0, -60.0, -120.0, -1000.0])
def test_the_pull_of_k3_never_fades_and_never_overflows(drift):
    pull = gradient(lambda x: kl_penalty(x, torch.zeros(1), "k3"), drift)
    assert math.isfinite(pull)
    assert pull <= gradient(lambda x: kl_penalty(x, torch.zeros(1), "k3"), drift / 2)


def test_k3_keeps_its_digits_near_zero():
    value = kl_penalty(torch.tensor([1e-3, -1e-3]), torch.zeros(2), "k3")
    torch.testing.assert_close(value, torch.tensor([4.998e-7, 5.002e-7]), rtol=1e-3, atol=0)


def test_k3_does_not_jump_where_its_formula_changes():
    below, above = (kl_penalty(torch.tensor([d]), torch.zeros(1), "k3") for d in (-0.99999, -1.00001))
    torch.testing.assert_close(below, above, rtol=1e-4, atol=0)


def test_unknown_estimator_is_named():
    with pytest.raises(ValueError, match="k1, k2 or k3"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")


def test_safe_exp_is_exp_and_then_its_tangent():
    x = torch.tensor([-100.0, -1.0, 0.0, 19.9, 20.0])
    torch.testing.assert_close(safe_exp(x), x.exp())
    assert safe_exp(torch.tensor(25.0)).item() == pytest.approx(6 * math.exp(20), rel=1e-5)
    assert gradient(safe_exp, 300.0) == pytest.approx(math.exp(20), rel=1e-5)


def test_importance_weights_by_hand():
    rollout = torch.log(torch.tensor([0.5, 0.5, 0.5, 0.5]))
    old = torch.log(torch.tensor([0.5, 0.25, 0.75, 0.999])).requires_grad_()
    weights = importance_weights(old, rollout, cap=1.6)
    torch.testing.assert_close(weights, torch.tensor([1.0, 0.5, 1.5, 1.6]))
    assert not weights.requires_grad
    assert importance_weights(torch.tensor([0.0]), torch.tensor([-1e4]), cap=2.0).item() == 2.0
