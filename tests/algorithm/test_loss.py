"""The assembled loss: values by hand, masks that hide NaN, gradients that no split of the batch changes."""
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.algorithm.loss import finished, make_loss
from mrl.algorithm.weights import token_weights
from mrl.config.algorithm import Algorithm, Correction
from tests.reference import losses as reference


def fields(**named):
    count = len(named["advantage"])
    named = {"loss_mask": [True] * count, "sequence": [0] * count, "mean_weight": named["token_weight"], **named}
    return {name: torch.tensor(value) for name, value in named.items()}


def run(algorithm, log_probs, named, entropy=None):
    log_probs = torch.tensor(log_probs, requires_grad=True)
    entropy = torch.zeros_like(log_probs) if entropy is None else torch.tensor(entropy)
    loss, metrics = make_loss(algorithm, algorithm.kl.coef)(log_probs, entropy, named)
    loss.backward()
    return loss.item(), {name: value.item() for name, value in metrics.items()}, log_probs.grad


def test_on_policy_value_and_gradient_by_hand():
    named = fields(token_weight=[0.5, 0.5], advantage=[1.0, -3.0], rollout_log_prob=[-1.0, -2.0])
    loss, metrics, grad = run(Algorithm(), [-1.0, -2.0], named)
    # ratio 1 everywhere: loss = -(0.5 * 1 + 0.5 * -3) = 1, gradient = -w A.
    assert loss == pytest.approx(1.0)
    torch.testing.assert_close(grad, torch.tensor([-0.5, 1.5]))
    assert metrics == pytest.approx({"policy_loss": 1.0, "entropy": 0.0, "clip_fraction": 0.0, "ratio": 1.0,
                                     "logprob_diff": 0.0, "logprob_diff_max": 0.0})


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
    assert metrics["ratio"] == pytest.approx(1.05)
    # Kept weights 0.5 and 2: mean 1.25, mean square 2.125.
    assert finished(metrics).items() >= {"importance_weight": pytest.approx(1.25), "importance_cut": 0.5,
                                         "importance_max": pytest.approx(4.0),
                                         "importance_ess": pytest.approx(1.25 ** 2 / 2.125)}.items()
    assert "importance_square" not in finished(metrics)


def test_the_largest_importance_is_that_of_a_sampled_token():
    named = fields(loss_mask=[True, False], token_weight=[1.0, 0.0], advantage=[1.0, 1.0], rollout_log_prob=[0.0, 0.0],
                   old_log_prob=[math.log(0.5), 3.0])
    metrics = run(Algorithm(old_log_prob="recompute"), [math.log(0.5), 0.0], named)[1]
    assert metrics["importance_max"] == pytest.approx(0.5)


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
    assert loss == pytest.approx(-1.0) and not any(name.startswith("importance") for name in metrics)


def test_kl_and_entropy_enter_with_their_coefficients():
    algorithm = Algorithm(kl={"coef": 0.1}, entropy_coef=0.01)
    half, quarter = math.log(0.5), math.log(0.25)
    named = fields(token_weight=[1.0], advantage=[0.0], rollout_log_prob=[half], ref_log_prob=[quarter])
    loss, metrics, grad = run(algorithm, [half], named, entropy=[2.0])
    assert metrics["kl"] == pytest.approx(0.1931, abs=5e-5)
    assert metrics["entropy"] == pytest.approx(2.0)
    assert loss == pytest.approx(0.1 * 0.19315 - 0.01 * 2.0, abs=1e-5)
    assert grad.item() == pytest.approx(0.1 * (1 - 0.5))


def test_kl_in_the_reward_is_measured_and_has_no_gradient():
    half, quarter = math.log(0.5), math.log(0.25)
    named = fields(token_weight=[1.0], advantage=[0.0], rollout_log_prob=[half], ref_log_prob=[quarter])
    loss, metrics, grad = run(Algorithm(kl={"coef": 0.1, "place": "reward", "estimator": "k1"}), [half], named)
    assert (loss, grad.item()) == (0.0, 0.0) and metrics["kl"] == pytest.approx(0.6931, abs=5e-5)


def test_the_coefficient_in_force_counts():
    named = fields(token_weight=[1.0], advantage=[0.0], rollout_log_prob=[0.0], ref_log_prob=[-1.0])
    loss, _ = make_loss(Algorithm(kl={"coef": 0.1, "estimator": "k2"}), 0.4)(torch.zeros(1), torch.zeros(1), named)
    assert loss.item() == pytest.approx(0.4 * 0.5)


def test_metrics_are_means_over_tokens_whatever_the_weights_of_the_loss():
    named = fields(token_weight=[3.0, 9.0], advantage=[1.0, 1.0], rollout_log_prob=[0.0, 0.0], mean_weight=[0.5, 0.5])
    loss, metrics, _ = run(Algorithm(), [math.log(1.1), 0.0], named, entropy=[1.0, 2.0])
    assert loss == metrics["policy_loss"] == pytest.approx(-(3 * 1.1 + 9))
    assert metrics["ratio"] == pytest.approx(1.05) and metrics["entropy"] == 1.5


@pytest.mark.parametrize("algorithm", [
    Algorithm(kl={"coef": 0.1}, entropy_coef=0.01),
    Algorithm(policy_loss="gspo", clip={"dual": 3.0}),
    Algorithm(policy_loss="cispo"),
    Algorithm(policy_loss="reinforce", old_log_prob="recompute", correction={"kind": "mask", "level": "sequence"}),
    Algorithm(old_log_prob="recompute", kl={"coef": 0.1, "estimator": "k1", "straight_through": True})])
def test_nan_at_masked_positions_reaches_nothing(algorithm):
    nan, half = math.nan, math.log(0.5)
    named = fields(loss_mask=[False, True, False], token_weight=[nan, 1.0, nan], advantage=[nan, 1.0, math.inf],
                   mean_weight=[nan, 1.0, nan],
                   rollout_log_prob=[nan, half, -math.inf], ref_log_prob=[nan, half, nan])
    if algorithm.old_log_prob == "recompute":
        named["old_log_prob"] = torch.tensor([nan, half, nan])
    loss, metrics, grad = run(algorithm, [nan, half, -math.inf], named, entropy=[nan, 0.0, nan])
    expected = half if algorithm.policy_loss in ("cispo", "reinforce") else 1.0
    assert loss == pytest.approx(-expected)
    assert all(math.isfinite(value) for value in metrics.values())
    assert grad.tolist() == [0.0, -1.0, 0.0]


@pytest.mark.parametrize("length", [0, 3])
def test_a_microbatch_without_sampled_tokens_has_loss_and_gradient_zero(length):
    empty = {name: torch.zeros(length) for name in ("token_weight", "advantage", "rollout_log_prob")}
    empty |= {"mean_weight": empty["token_weight"], "sequence": torch.zeros(length, dtype=torch.int64),
              "loss_mask": torch.zeros(length, dtype=torch.bool)}
    log_probs = torch.full((length,), -1.0, requires_grad=True)
    loss, metrics = make_loss(Algorithm(), 0.0)(log_probs, torch.zeros(length), empty)
    loss.backward()
    assert loss.item() == 0.0 and log_probs.grad.tolist() == [0.0] * length
    assert {value.item() for value in metrics.values()} == {0.0}


PROBABLE = st.floats(-3.0, -0.01)
ALGORITHMS = st.fixed_dictionaries({
    "policy_loss": st.sampled_from(["ppo", "gspo", "cispo", "reinforce"]),
    "clip": st.sampled_from([{}, {"low": 0.3, "high": 0.6, "dual": 2.0}]),
    "aggregation": st.sampled_from(["token_mean", "sequence_mean", "sequence_mean_token_sum", "prompt_mean",
                                    "constant"]),
    "old_log_prob": st.sampled_from(["rollout", "recompute"]),
    "correction": st.sampled_from([{"kind": kind, "level": level, "floor": 0.5, "cap": 1.5}
                                   for kind in ("none", "truncate", "mask") for level in ("token", "sequence")]),
    "kl": st.sampled_from([{"coef": 0.1, "estimator": estimator, "place": place}
                           for estimator in ("k1", "k2", "k3") for place in ("loss", "reward")]),
    "entropy_coef": st.sampled_from([0.0, 0.05]),
})


@st.composite
def batches(draw):
    sequences = []
    for _ in range(draw(st.integers(1, 5))):
        mask = draw(st.lists(st.booleans(), min_size=1, max_size=4))

        def row(numbers):
            return draw(st.lists(numbers, min_size=len(mask), max_size=len(mask)))

        sequences.append({"mask": mask, "group": draw(st.integers(0, 1)), "advantage": row(st.floats(-2, 2)),
                          "entropy": row(st.floats(0, 2)),
                          **{name: row(PROBABLE) for name in ("log_prob", "rollout", "old", "ref")}})
    return sequences


def packed(sequences, which):
    """Fields of the sequences `which`, one after the other; weights are those of the whole batch."""
    def flat(name, dtype=torch.float64):
        return torch.cat([torch.tensor(sequences[i][name], dtype=dtype) for i in which])

    lengths = torch.tensor([len(sequences[i]["mask"]) for i in which])
    return {"loss_mask": flat("mask", torch.bool), "advantage": flat("advantage"), "rollout_log_prob": flat("rollout"),
            "ref_log_prob": flat("ref"), "old_log_prob": flat("old"), "token_weight": flat("weight"),
            "mean_weight": flat("share"), "sequence": torch.arange(len(which)).repeat_interleave(lengths)}


def total(algorithm, sequences, microbatches, kl_coef):
    """Loss, gradient by sequence, and metrics, summed over microbatches as a trainer does."""
    loss_fn, summed, totals = make_loss(algorithm, kl_coef), 0.0, {}
    gradients = [None] * len(sequences)
    for which in microbatches:
        rows = [torch.tensor(sequences[i]["log_prob"], dtype=torch.float64, requires_grad=True) for i in which]
        entropy = torch.cat([torch.tensor(sequences[i]["entropy"], dtype=torch.float64) for i in which])
        named = packed(sequences, which)
        if algorithm.old_log_prob == "rollout":
            del named["old_log_prob"]
        loss, metrics = loss_fn(torch.cat(rows), entropy, named)
        loss.backward()
        summed += loss.item()
        for i, row in zip(which, rows):
            gradients[i] = row.grad
        for name, value in metrics.items():
            known = totals.get(name, 0.0)
            totals[name] = max(known, value.item()) if name.endswith("_max") else known + value.item()
    return summed, torch.cat(gradients), finished(totals)


@settings(max_examples=150, deadline=None)
@given(batches(), ALGORITHMS, st.randoms(use_true_random=False))
def test_random_batches_in_random_microbatches(batch, options, random):
    algorithm, kl_coef, constant = Algorithm(**options), 0.2, 7
    masks = [torch.tensor(s["mask"]) for s in batch]
    weights = token_weights(masks, algorithm.aggregation, None, [s["group"] for s in batch], constant)
    for s, weight, share in zip(batch, weights, token_weights(masks, "token_mean")):
        s["weight"], s["share"] = weight.tolist(), share.tolist()
    order = list(range(len(batch)))
    random.shuffle(order)
    cut = random.randint(0, len(order))
    microbatches = [part for part in (order[:cut], order[cut:]) if part]
    loss, gradient, metrics = total(algorithm, batch, microbatches, kl_coef)

    corrected = algorithm.old_log_prob == "recompute"
    plain = {**options, "clip": (algorithm.clip.low, algorithm.clip.high, algorithm.clip.dual),
             "constant_tokens": constant, "old": "old" if corrected else "rollout",
             "correction": options["correction"] if corrected else {**options["correction"], "kind": "none"},
             "kl": {"estimator": algorithm.kl.estimator, "in_loss": algorithm.kl.place == "loss"}}
    if not any(any(s["mask"]) for s in batch):
        assert loss == 0.0 and not gradient.any()
        return
    expected, means = reference.loss(batch, plain, kl_coef)
    assert loss == pytest.approx(expected, rel=1e-6, abs=1e-6)
    names = {"policy_loss": "policy_loss", "kl": "kl", "entropy": "entropy", "ratio": "ratio",
             "logprob_diff": "logprob_diff", "importance_weight": "weight", "importance_cut": "cut",
             "importance_ess": "ess", "importance_max": "largest"}
    for ours, theirs in names.items():
        if ours in metrics:
            assert metrics[ours] == pytest.approx(means[theirs], rel=1e-6, abs=1e-6), ours
    assert ("importance_weight" in metrics) == (corrected and algorithm.correction.kind != "none")
    whole = total(algorithm, batch, [list(range(len(batch)))], kl_coef)
    torch.testing.assert_close(gradient, whole[1], rtol=1e-9, atol=1e-12)
    assert metrics == pytest.approx(whole[2], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("options", [
    {}, {"clip": {"dual": 1.5}}, {"policy_loss": "gspo", "aggregation": "sequence_mean"},
    {"kl": {"coef": 0.1, "estimator": "k3"}, "aggregation": "prompt_mean"},
    {"old_log_prob": "recompute", "correction": {"kind": "mask", "level": "sequence", "cap": 1.5}},
])
def test_the_gradient_is_the_slope_of_the_reference_loss(options):
    """By finite differences. GSPO: its gradient is the paper's only where a sequence's advantages are equal."""
    torch.manual_seed(1)
    batch = []
    for index, length in enumerate((3, 1, 4)):
        rows = {name: (-torch.rand(length) - 0.5).tolist() for name in ("log_prob", "rollout", "old", "ref")}
        batch.append({"mask": [True] * length, "group": index % 2, "advantage": [(-1.0) ** index] * length,
                      "entropy": [0.0] * length, **rows})
    algorithm = Algorithm(**options)
    masks = [torch.tensor(s["mask"]) for s in batch]
    weights = token_weights(masks, algorithm.aggregation, None, [s["group"] for s in batch], 7)
    for s, weight in zip(batch, weights):
        s["weight"] = s["share"] = weight.tolist()
    corrected = algorithm.old_log_prob == "recompute"
    correction = algorithm.correction.model_dump() if corrected else {**Correction().model_dump(), "kind": "none"}
    plain = {"policy_loss": algorithm.policy_loss, "aggregation": algorithm.aggregation, "constant_tokens": 7,
             "clip": (algorithm.clip.low, algorithm.clip.high, algorithm.clip.dual),
             "old": "old" if corrected else "rollout", "correction": correction,
             "kl": {"estimator": algorithm.kl.estimator, "in_loss": algorithm.kl.coef > 0}, "entropy_coef": 0.0}
    slopes = reference.gradient(batch, plain, algorithm.kl.coef)
    got = total(algorithm, batch, [[0, 1], [2]], algorithm.kl.coef)[1]
    torch.testing.assert_close(got, torch.tensor(sum(slopes, [])).double(), rtol=1e-4, atol=1e-7)


def test_missing_or_contradicting_fields_are_named():
    named = fields(token_weight=[1.0], advantage=[0.0], rollout_log_prob=[0.0])
    with pytest.raises(KeyError, match="ref_log_prob.*kl.coef"):
        run(Algorithm(kl={"coef": 0.1}), [0.0], named)
    with pytest.raises(ValueError, match="old_log_prob"):
        run(Algorithm(), [0.0], named | {"old_log_prob": torch.zeros(1)})
