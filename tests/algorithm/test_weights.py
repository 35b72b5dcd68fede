"""Token weights: they sum to 1 per minibatch, and so no split of the batch can change a mean."""
import pytest
import torch

from mrl.algorithm.weights import token_weights


def mask(*bits):
    return torch.tensor(bits, dtype=torch.bool)


ONE_AND_THREE = [mask(0, 1), mask(0, 1, 1, 1)]
LOSSES = [torch.tensor([9.0, 1.0]), torch.tensor([9.0, 2.0, 2.0, 2.0])]


ALL = ["token_mean", "sequence_mean", "sequence_mean_token_sum", "prompt_mean", "constant"]
MEANS = ["token_mean", "sequence_mean", "prompt_mean"]


def weigh(masks, aggregation, minibatches=None, groups=None):
    return token_weights(masks, aggregation, minibatches, groups or range(len(masks)), constant_tokens=8)


@pytest.mark.parametrize("aggregation, expected", [
    ("token_mean", 1.75), ("sequence_mean", 1.5), ("sequence_mean_token_sum", 3.5), ("prompt_mean", 1.5),
    ("constant", 7 / 16)])
def test_lengths_one_and_three_with_losses_one_and_two(aggregation, expected):
    weights = weigh(ONE_AND_THREE, aggregation)
    per_sequence = [float((w * loss).sum()) for w, loss in zip(weights, LOSSES)]
    # The sum over any microbatches: both sequences together, or each alone and then added.
    assert sum(per_sequence) == pytest.approx(expected)
    assert float((torch.cat(weights) * torch.cat(LOSSES)).sum()) == pytest.approx(expected)


def test_weights_by_hand():
    token, sequence = (token_weights(ONE_AND_THREE, name) for name in ("token_mean", "sequence_mean"))
    torch.testing.assert_close(torch.cat(token), torch.tensor([0, 0.25, 0, 0.25, 0.25, 0.25]))
    torch.testing.assert_close(torch.cat(sequence), torch.tensor([0, 0.5, 0, 1 / 6, 1 / 6, 1 / 6]))
    assert token[0].dtype == torch.float32


def test_a_prompt_counts_once_however_many_tokens_its_samples_have():
    masks = [mask(0, 1), mask(0, 1, 1, 1), mask(1, 1), mask(0, 0)]
    weights = weigh(masks, "prompt_mean", groups=[7, 7, 9, 8])
    torch.testing.assert_close(torch.cat(weights), torch.tensor([0, 1 / 8, 0, 1 / 8, 1 / 8, 1 / 8, 1 / 4, 1 / 4, 0, 0]))


@pytest.mark.parametrize("aggregation", ALL)
def test_every_minibatch_is_weighed_on_its_own(aggregation):
    masks = [mask(*bits) for bits in [(0, 1), (1, 1, 1), (0, 0, 1, 1), (1,), (0, 0)]]
    minibatch = [0, 1, 1, 0, 1]
    weights = weigh(masks, aggregation, minibatch)
    for wanted in (0, 1):
        own = [index for index, of in enumerate(minibatch) if of == wanted]
        alone = weigh([masks[index] for index in own], aggregation, groups=own)
        torch.testing.assert_close([weights[index] for index in own], alone)
        if aggregation in MEANS:
            assert float(torch.cat(alone).sum()) == pytest.approx(1.0, abs=1e-6)


def test_tool_tokens_inside_a_sequence_get_no_weight():
    [weights] = token_weights([mask(0, 1, 0, 0, 1)], "token_mean")
    assert weights.tolist() == [0.0, 0.5, 0.0, 0.0, 0.5]


@pytest.mark.parametrize("aggregation", ALL)
def test_an_empty_completion_neither_contributes_nor_counts(aggregation):
    with_empty = weigh([*ONE_AND_THREE, mask(0, 0, 0)], aggregation)
    torch.testing.assert_close(with_empty[:2], weigh(ONE_AND_THREE, aggregation))
    assert with_empty[2].tolist() == [0.0] * 3


@pytest.mark.parametrize("aggregation", ALL)
def test_a_minibatch_without_sampled_tokens_has_weight_zero(aggregation):
    assert torch.cat(weigh([mask(0, 0), mask(0)], aggregation)).tolist() == [0.0] * 3


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"masks\[1\] must be bool"):
        token_weights([mask(1), torch.ones(2)], "token_mean")
    with pytest.raises(ValueError, match="minibatch ids"):
        token_weights(ONE_AND_THREE, "token_mean", [0])
    with pytest.raises(ValueError, match="token_mean, sequence_mean"):
        token_weights(ONE_AND_THREE, "token_sum")
    with pytest.raises(ValueError, match="needs group_ids"):
        token_weights(ONE_AND_THREE, "prompt_mean")
    with pytest.raises(ValueError, match="needs constant_tokens"):
        token_weights(ONE_AND_THREE, "constant")
