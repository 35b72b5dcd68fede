"""Token weights: they sum to 1 per minibatch, and so no split of the batch can change a mean."""
import pytest
import torch

from mrl.algorithm.weights import token_weights


def mask(*bits):
    return torch.tensor(bits, dtype=torch.bool)


ONE_AND_THREE = [mask(0, 1), mask(0, 1, 1, 1)]
LOSSES = [torch.tensor([9.0, 1.0]), torch.tensor([9.0, 2.0, 2.0, 2.0])]


@pytest.mark.parametrize("aggregation, expected", [("token_mean", 1.75), ("sequence_mean", 1.5)])
def test_lengths_one_and_three_with_losses_one_and_two(aggregation, expected):
    weights = token_weights(ONE_AND_THREE, aggregation)
    per_sequence = [float((w * loss).sum()) for w, loss in zip(weights, LOSSES)]
    # The sum over any microbatches: both sequences together, or each alone and then added.
    assert sum(per_sequence) == pytest.approx(expected)
    assert float((torch.cat(weights) * torch.cat(LOSSES)).sum()) == pytest.approx(expected)


def test_weights_by_hand():
    token, sequence = (token_weights(ONE_AND_THREE, name) for name in ("token_mean", "sequence_mean"))
    torch.testing.assert_close(torch.cat(token), torch.tensor([0, 0.25, 0, 0.25, 0.25, 0.25]))
    torch.testing.assert_close(torch.cat(sequence), torch.tensor([0, 0.5, 0, 1 / 6, 1 / 6, 1 / 6]))
    assert token[0].dtype == torch.float32


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_every_minibatch_sums_to_one_on_its_own(aggregation):
    masks = [mask(*bits) for bits in [(0, 1), (1, 1, 1), (0, 0, 1, 1), (1,), (0, 0)]]
    minibatch = [0, 1, 1, 0, 1]
    weights = token_weights(masks, aggregation, minibatch)
    for wanted in (0, 1):
        total = sum(float(w.sum()) for w, m in zip(weights, minibatch) if m == wanted)
        assert total == pytest.approx(1.0, abs=1e-6)


def test_tool_tokens_inside_a_sequence_get_no_weight():
    [weights] = token_weights([mask(0, 1, 0, 0, 1)], "token_mean")
    assert weights.tolist() == [0.0, 0.5, 0.0, 0.0, 0.5]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_an_empty_completion_neither_contributes_nor_counts(aggregation):
    with_empty = token_weights([*ONE_AND_THREE, mask(0, 0, 0)], aggregation)
    for got, expected in zip(with_empty, token_weights(ONE_AND_THREE, aggregation)):
        torch.testing.assert_close(got, expected)
    assert with_empty[2].tolist() == [0.0] * 3


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_a_minibatch_without_sampled_tokens_has_weight_zero(aggregation):
    weights = token_weights([mask(0, 0), mask(0)], aggregation)
    assert torch.cat(weights).tolist() == [0.0] * 3


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"masks\[1\] must be bool"):
        token_weights([mask(1), torch.ones(2)], "token_mean")
    with pytest.raises(ValueError, match="minibatch ids"):
        token_weights(ONE_AND_THREE, "token_mean", [0])
    with pytest.raises(ValueError, match="token_mean or sequence_mean"):
        token_weights(ONE_AND_THREE, "token_sum")
