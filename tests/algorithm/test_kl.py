"""KL estimators, their gradients at the extremes, and the coefficient that adapts."""
import math

import pytest
import torch

from mrl.algorithm.kl import adapted_coef, kl_estimate
from mrl.config.algorithm import Kl


def value_and_slope(estimator, drift, **arguments):
    x = torch.tensor([drift], requires_grad=True)
    value = kl_estimate(x, torch.zeros(1), estimator, **arguments)
    value.sum().backward()
    return value.item(), x.grad.item()


@pytest.mark.parametrize("estimator, expected", [("k1", 0.6931), ("k2", 0.2402), ("k3", 0.1931)])
@pytest.mark.parametrize("straight_through", [False, True])
def test_estimators_at_half_and_quarter(estimator, expected, straight_through):
    value = kl_estimate(torch.log(torch.tensor([0.5])), torch.log(torch.tensor([0.25])), estimator, straight_through)
    assert value.item() == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("estimator, slope", [
    ("k1", lambda d: 1.0), ("k2", lambda d: d), ("k3", lambda d: 1.0 - math.exp(-d))])
@pytest.mark.parametrize("drift", [-5.0, -1.5, -0.5, -1e-3, 1e-3, 0.5, 1.5, 5.0, 50.0])
def test_gradients(estimator, slope, drift):
    assert value_and_slope(estimator, drift)[1] == pytest.approx(slope(drift), rel=1e-4)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("drift", [-30.0, -1.5, 0.5, 4.0])
def test_straight_through_has_its_own_value_and_the_gradient_of_k2(estimator, drift):
    value, slope = value_and_slope(estimator, drift, straight_through=True)
    assert slope == pytest.approx(drift) and value == pytest.approx(value_and_slope(estimator, drift)[0], rel=1e-6)


def test_the_expected_gradient_of_k2_is_that_of_the_kl():
    """Over all outcomes of a small policy, each by its probability; that of k1 is zero, that of k3 the reverse KL's."""
    torch.manual_seed(0)
    logits, reference = torch.randn(5, dtype=torch.float64, requires_grad=True), torch.randn(5).double().log_softmax(0)
    log_p = logits.log_softmax(0)
    [true] = torch.autograd.grad((log_p.exp() * (log_p - reference)).sum(), logits, retain_graph=True)
    [reverse] = torch.autograd.grad((reference.exp() * (reference - log_p)).sum(), logits, retain_graph=True)
    for estimator, straight, expected in (("k2", False, true), ("k1", True, true), ("k3", True, true),
                                          ("k1", False, torch.zeros(5).double()), ("k3", False, reverse)):
        loss = (log_p.exp().detach() * kl_estimate(log_p, reference, estimator, straight)).sum()
        [got] = torch.autograd.grad(loss, logits, retain_graph=True)
        torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("drift", [-15.0, -25.0, -60.0, -120.0, -1000.0])
def test_the_pull_of_k3_never_fades_and_never_overflows(drift):
    pull = value_and_slope("k3", drift)[1]
    assert math.isfinite(pull) and pull <= value_and_slope("k3", drift / 2)[1]


def test_k3_keeps_its_digits_near_zero():
    value = kl_estimate(torch.tensor([1e-3, -1e-3]), torch.zeros(2), "k3")
    torch.testing.assert_close(value, torch.tensor([4.998e-7, 5.002e-7]), rtol=1e-3, atol=0)


def test_k3_does_not_jump_where_its_formula_changes():
    assert value_and_slope("k3", -0.99999)[0] == pytest.approx(value_and_slope("k3", -1.00001)[0], rel=1e-4)


def test_unknown_estimator_is_named():
    with pytest.raises(ValueError, match="k1, k2 or k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


@pytest.mark.parametrize("measured, expected", [
    (0.1, 0.2), (0.11, 0.202), (0.09, 0.198), (5.0, 0.204), (0.0, 0.196)])  # the error counts up to 20 %
def test_the_coefficient_follows_the_target(measured, expected):
    kl = Kl(coef=0.5, target=0.1, horizon=1000)
    assert adapted_coef(0.2, measured, samples=100, kl=kl) == pytest.approx(expected)


def test_without_a_target_the_coefficient_stays():
    assert adapted_coef(0.2, 9.0, samples=100, kl=Kl(coef=0.2)) == 0.2


def test_the_coefficient_settles_where_the_kl_is_on_target():
    """A policy whose KL falls as the coefficient grows."""
    kl, coef = Kl(coef=0.01, target=0.05, horizon=1000), 0.01
    for _ in range(400):
        coef = adapted_coef(coef, measured=0.01 / coef, samples=128, kl=kl)
    assert 0.01 / coef == pytest.approx(0.05, rel=1e-3)
