"""The assembled loss: values by hand, masks that hide NaN, gradients that no split of the batch changes."""
import math

import pytest
import torch

from mrl.algorithm.grpo import make_loss
from mrl.algorithm.weights import token_weights
from mrl.config.algorithm import Algorithm


def fields(**named):
    named.setdefault("loss_mask", [True] * len(named["advantage"]))
    return {name: torch.tensor(value) for name, value in named.items()}


def run(algorithm, log_probs, named, entropy=None):
    log_probs = torch.tensor(log_probs, requires_grad=True)
    entropy = torch.zeros_like(log_probs) if entropy is None else torch.tensor(entropy)
    loss, metrics = make_loss(algorithm)(log_probs, entropy, named)
    loss.backward()
    return loss.item(), {name: value.item() for name, value in metrics.items()}, log_probs.grad


def test_on_policy_value_and_gradient_by_hand():
    named = fields(token_weight=[0.5, 0.5], advantage=[1.0, -3.0], rollout_log_prob=[-1.0, -2.0])
    loss, metrics, grad = run(Algorithm(), [-1.0, -2.0], named)
    # ratio 1 everywhere: loss = -(0.5 * 1 + 0.5 * -3) = 1, gradient = -w A.
    assert loss == pytest.approx(1.0)
    torch.testing.assert_close(grad, torch.tensor([-0.5, 1.5]))
    assert metrics == pytest.approx({"policy_loss": 1.0, "entropy": 0.0, "clip_fraction": 0.0, "ratio": 1.0,
                                     "importance_weight": 1.0, "logprob_diff": 0.0, "logprob_diff_max": 0.0})


def test_rollout_log_probs_are_proximal_by_default_and_clip():
    named = fields(token_weight=[0.5, 0.5], advantage=[1.0, 1.0], rollout_log_prob=[0.0, 0.0])
    loss, metrics, grad = run(Algorithm(), [math.log(1.1), math.log(1.5)], named)
    assert loss == pytest.approx(-(0.5 * 1.1 + 0.5 * 1.2))
    torch.testing.assert_close(grad, torch.tensor([-0.55, 0.0]))
    assert metrics["clip_fraction"] == 0.5
    assert metrics["ratio"] == pytest.approx(1.3)
    assert metrics["logprob_diff"] == pytest.approx((math.log(1.1) + math.log(1.5)) / 2)
    assert metrics["logprob_diff_max"] == pytest.approx(math.log(1.5))


def test_recomputed_log_probs_are_proximal_and_corrected():
    recompute = Algorithm(old_log_prob="recompute")
    named = fields(token_weight=[0.5, 0.5], advantage=[1.0, 1.0], rollout_log_prob=[0.0, 0.0],
                   old_log_prob=[math.log(0.5), math.log(4.0)])
    loss, metrics, _ = run(recompute, [math.log(0.55), math.log(4.0)], named)
    # ratios to old 1.1 and 1; corrections 0.5 and 4 truncated at 2.
    assert loss == pytest.approx(-(0.5 * 0.5 * 1.1 + 0.5 * 2.0 * 1.0))
    assert metrics["importance_weight"] == pytest.approx(1.25)
    assert metrics["ratio"] == pytest.approx(1.05)


def test_without_a_recomputed_field_the_first_forward_is_proximal():
    named = fields(token_weight=[1.0], advantage=[1.0], rollout_log_prob=[-1.0])
    loss, metrics, grad = run(Algorithm(old_log_prob="recompute"), [-1.0 + math.log(0.7)], named)
    assert metrics["ratio"] == 1.0
    assert loss == pytest.approx(-0.7)
    assert grad.item() == pytest.approx(-0.7)


def test_correction_can_be_switched_off():
    off = Algorithm(old_log_prob="recompute", correction={"kind": "none"})
    named = fields(token_weight=[1.0], advantage=[1.0], rollout_log_prob=[0.0], old_log_prob=[-1.0])
    loss, metrics, _ = run(off, [-1.0], named)
    assert loss == pytest.approx(-1.0) and metrics["importance_weight"] == 1.0


def test_kl_and_entropy_enter_with_their_coefficients():
    algorithm = Algorithm(kl={"coef": 0.1}, entropy_coef=0.01)
    half, quarter = math.log(0.5), math.log(0.25)
    named = fields(token_weight=[1.0], advantage=[0.0], rollout_log_prob=[half], ref_log_prob=[quarter])
    loss, metrics, grad = run(algorithm, [half], named, entropy=[2.0])
    assert metrics["kl"] == pytest.approx(0.1931, abs=5e-5)
    assert metrics["entropy"] == pytest.approx(2.0)
    assert loss == pytest.approx(0.1 * 0.19315 - 0.01 * 2.0, abs=1e-5)
    assert grad.item() == pytest.approx(0.1 * (1 - 0.5))


@pytest.mark.parametrize("algorithm", [
    Algorithm(kl={"coef": 0.1}, entropy_coef=0.01),
    Algorithm(old_log_prob="recompute", kl={"coef": 0.1, "estimator": "k2"})])
def test_nan_at_masked_positions_reaches_nothing(algorithm):
    nan, half = math.nan, math.log(0.5)
    named = fields(loss_mask=[False, True, False], token_weight=[nan, 1.0, nan], advantage=[nan, 1.0, math.inf],
                   rollout_log_prob=[nan, half, -math.inf], ref_log_prob=[nan, half, nan])
    if algorithm.old_log_prob == "recompute":
        named["old_log_prob"] = torch.tensor([nan, half, nan])
    loss, metrics, grad = run(algorithm, [nan, half, -math.inf], named, entropy=[nan, 0.0, nan])
    assert loss == pytest.approx(-1.0)
    assert all(math.isfinite(value) for value in metrics.values())
    assert grad.tolist() == [0.0, -1.0, 0.0]


@pytest.mark.parametrize("length", [0, 3])
def test_a_microbatch_without_sampled_tokens_has_loss_and_gradient_zero(length):
    empty = {name: torch.zeros(length) for name in ("token_weight", "advantage", "rollout_log_prob")}
    empty["loss_mask"] = torch.zeros(length, dtype=torch.bool)
    log_probs = torch.full((length,), -1.0, requires_grad=True)
    loss, metrics = make_loss(Algorithm())(log_probs, torch.zeros(length), empty)
    loss.backward()
    assert loss.item() == 0.0 and log_probs.grad.tolist() == [0.0] * length
    assert {value.item() for value in metrics.values()} == {0.0}


def a_batch():
    """Six sequences of a linear toy policy, in double precision so that only logic can differ."""
    torch.manual_seed(0)
    lengths = [2, 5, 3, 7, 4, 6]
    masks = [torch.arange(n) >= 1 for n in lengths]
    masks[2][:] = False
    weights = token_weights(masks, "token_mean")
    samples = []
    for n, mask, weight in zip(lengths, masks, weights):
        samples.append({"features": torch.randn(n, 4).double(), "loss_mask": mask, "token_weight": weight.double(),
                        "advantage": torch.randn(()).double().expand(n),
                        "rollout_log_prob": torch.randn(n).double() * 0.1,
                        "ref_log_prob": torch.randn(n).double() * 0.1})
    return samples


def gradient_and_metrics(microbatches):
    """Sum over microbatches, as a trainer accumulates."""
    loss_fn = make_loss(Algorithm(kl={"coef": 0.1}, entropy_coef=0.01))
    parameter = torch.full((4,), 0.1, dtype=torch.float64, requires_grad=True)
    totals = {}
    for microbatch in microbatches:
        packed = {name: torch.cat([s[name] for s in microbatch]) for name in microbatch[0]}
        log_probs = packed.pop("features") @ parameter
        loss, metrics = loss_fn(log_probs, log_probs.square(), packed)
        loss.backward()
        for name, value in metrics.items():
            known = totals.get(name, 0.0)
            totals[name] = max(known, value.item()) if name.endswith("_max") else known + value.item()
    return parameter.grad, totals


@pytest.mark.parametrize("split", [
    [[0], [1], [2], [3], [4], [5]],
    [[0, 1, 2, 3], [4, 5]],
    [[5, 4, 3, 2, 1, 0]],
    [[3, 0], [2], [5, 1, 4]],
])
def test_no_split_and_no_order_changes_gradient_or_metrics(split):
    samples = a_batch()
    expected_gradient, expected_metrics = gradient_and_metrics([samples])
    got_gradient, got_metrics = gradient_and_metrics([[samples[i] for i in microbatch] for microbatch in split])
    assert expected_gradient.abs().max() > 1e-3
    torch.testing.assert_close(got_gradient, expected_gradient, rtol=1e-12, atol=1e-14)
    assert got_metrics == pytest.approx(expected_metrics, rel=1e-12)


def test_missing_or_contradicting_fields_are_named():
    named = fields(token_weight=[1.0], advantage=[0.0], rollout_log_prob=[0.0])
    with pytest.raises(KeyError, match="ref_log_prob.*kl.coef"):
        run(Algorithm(kl={"coef": 0.1}), [0.0], named)
    with pytest.raises(ValueError, match="old_log_prob"):
        run(Algorithm(), [0.0], named | {"old_log_prob": torch.zeros(1)})
