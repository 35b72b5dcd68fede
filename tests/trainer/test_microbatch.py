"""Assignment of samples to microbatches, and packing."""
import random

import pytest
import torch

from mrl.trainer.microbatch import assign, pack


def flat(assignment):
    return sorted(index for rank in assignment for microbatch in rank for index in microbatch)


@pytest.mark.parametrize("dp", [1, 2, 3, 8])
def test_every_sample_once_within_budget_and_equal_counts(dp):
    generator = random.Random(dp)
    for _ in range(50):
        lengths = [generator.randint(1, 100) for _ in range(generator.randint(0, 40))]
        budget = max([*lengths, 100]) + generator.randint(0, 200)
        assignment = assign(lengths, dp, budget)
        assert len(assignment) == dp
        assert flat(assignment) == list(range(len(lengths)))
        assert len({len(rank) for rank in assignment}) == 1 and len(assignment[0]) >= 1
        assert all(sum(lengths[i] for i in microbatch) <= budget for rank in assignment for microbatch in rank)


def test_ranks_are_balanced_by_tokens_not_by_samples():
    assignment = assign([100, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10], dp=2, max_tokens=1000)
    assert assignment == [[[0]], [list(range(1, 11))]]


def test_one_microbatch_when_everything_fits():
    assert assign([3, 4, 5], dp=1, max_tokens=12) == [[[0, 1, 2]]]
    assert len(assign([3, 4, 5], dp=1, max_tokens=11)[0]) == 2


def test_fewer_samples_than_ranks_gives_empty_microbatches():
    assert assign([5], dp=3, max_tokens=10) == [[[0]], [[]], [[]]]
    assert assign([], dp=2, max_tokens=10) == [[[]], [[]]]


def test_a_sample_longer_than_the_budget_names_the_key():
    with pytest.raises(ValueError, match=r"sample 1 has 11 tokens.*batch.max_tokens_per_microbatch = 10"):
        assign([3, 11], dp=1, max_tokens=10)


def sample(*tokens):
    return {"tokens": torch.tensor(tokens), "weights": torch.tensor(tokens) / 2}


def test_pack_without_padding():
    packed = pack([sample(1, 2, 3), sample(4)])
    assert packed.tokens.tolist() == [1, 2, 3, 4]
    assert packed.position_ids.tolist() == [0, 1, 2, 0]
    assert packed.cu_seqlens.tolist() == [0, 3, 4] and packed.cu_seqlens.dtype == torch.int32
    assert packed.fields["weights"].tolist() == [0.5, 1.0, 1.5, 2.0]
    assert (packed.real, packed.longest) == (4, 3)


def test_padding_is_a_sequence_of_its_own_and_in_no_field():
    packed = pack([sample(1, 2, 3), sample(4, 5)], multiple_of=4)
    assert packed.tokens.tolist() == [1, 2, 3, 4, 5, 0, 0, 0]
    assert packed.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert packed.cu_seqlens.tolist() == [0, 3, 5, 8]
    assert len(packed.fields["tokens"]) == len(packed.fields["weights"]) == packed.real == 5


def test_an_empty_microbatch_is_padding_alone():
    packed = pack([], multiple_of=2)
    assert packed.cu_seqlens.tolist() == [0, 2] and packed.real == 0 and packed.longest == 2


def test_context_parallelism_pads_every_sequence():
    packed = pack([sample(1, 2, 3), sample(4, 5, 6, 7)], cp=2)
    assert packed.tokens.tolist() == [1, 2, 3, 0, 4, 5, 6, 7]
    assert packed.cu_seqlens.tolist() == [0, 4, 8] and packed.longest == 4
    assert packed.places.tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert packed.tokens[packed.places].tolist() == packed.fields["tokens"].tolist()
    shares = pack([sample(1, 2, 3), sample(4, 5, 6, 7)], multiple_of=3, cp=2)
    assert len(shares.tokens) == 12 and shares.cu_seqlens.tolist() == [0, 4, 8, 12]


@pytest.mark.parametrize(("samples", "words"), [
    ([{"weights": torch.ones(2)}], "no field 'tokens'"),
    ([sample(1), {"tokens": torch.tensor([1])}], "sample 1 has fields"),
    ([{"tokens": torch.tensor([1, 2]), "weights": torch.ones(3)}], r"'weights': \(3,\)"),
])
def test_malformed_samples(samples, words):
    with pytest.raises(ValueError, match=words):
        pack(samples)
