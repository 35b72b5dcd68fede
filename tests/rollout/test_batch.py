import pickle

import numpy as np
import pytest
import torch

from mrl.algorithm.advantages import estimate
from mrl.engine.api import Version
from mrl.rollout.batch import check_versions, rollout_metrics, split_batch
from mrl.trainer.microbatch import pack
from tests.rollout.experiments import experiment
from tests.rollout.groups import group, trajectory


def members(shares):
    return [sample for share in shares for sample in share.samples]


def test_what_is_scored_and_weights_that_sum_to_one_over_replicas():
    groups = [group(4, [1, 0], [1, 3]), group(2, [1, 0, 0.5, 0], [2, 2, 2, 2])]
    groups[1].baseline = trajectory(reward=0.25)
    split = split_batch(groups, experiment(), replicas=2)
    assert sum(float(s["token_weight"].sum()) for s in members(split.shares)) == pytest.approx(1.0, abs=1e-6)
    assert [(s.group, s.reward, s.baseline) for s in split.scored] == [
        (2, 1, 0.25), (2, 0, 0.25), (2, 0.5, 0.25), (2, 0, 0.25), (4, 1, None), (4, 0, None)]
    assert [int(s.mask.sum()) for s in split.scored] == [2, 2, 2, 2, 1, 3]


def test_values_find_their_samples_and_come_back():
    groups = [group(i, [1, 0, 1], [1 + i, 9 - i, 4]) for i in range(4)]
    split = split_batch(groups, experiment(batch={"minibatches": 2, "max_tokens_per_microbatch": 16}), replicas=3)
    dealt = split.deal([len(s.mask) for s in split.scored])
    assert [[len(s["tokens"]) for s in share.samples] for share in split.shares] == dealt
    names = [str(index) for index in range(12)]
    assert split.collect(split.deal(names)) == names
    assert all(len(part) for part in dealt)


def test_experts_go_with_the_tokens_they_are_of():
    one = group(0, [1, 0], [1, 3])
    for t in one.trajectories:
        t.experts = np.arange(len(t.tokens) * 6, dtype=np.int16).reshape(-1, 3, 2)
    for sample in members(split_batch([one], experiment(), 1).shares):
        packed = pack([sample, sample], multiple_of=16)
        assert torch.equal(packed.fields["experts"], torch.cat([sample["experts"]] * 2))
        assert sample["experts"].shape == (len(sample["tokens"]), 3, 2)
    assert all("experts" not in sample for sample in members(split_batch([group(0, [1])], experiment(), 1).shares))


@pytest.mark.parametrize("aggregation", ["sequence_mean", "sequence_mean_token_sum", "constant", "prompt_mean"])
def test_metrics_are_means_over_tokens_however_losses_are_summed(aggregation):
    shares = split_batch([group(0, [1, 0], [1, 3])], experiment(algorithm={"aggregation": aggregation}), 1).shares
    means = [s["mean_weight"][s["loss_mask"]].tolist() for s in members(shares)]
    assert sorted(means, key=len) == [[0.25], [0.25] * 3]
    totals = {"sequence_mean": 1, "prompt_mean": 1, "sequence_mean_token_sum": 2, "constant": 2 / 1024}
    total = sum(float(s["token_weight"].sum()) for s in members(shares))
    assert total == pytest.approx(totals[aggregation])  # max_response_tokens is 1024


def test_minibatches_hold_whole_groups_in_the_order_of_ids_and_each_sums_to_one():
    groups = [group(i, [1, 0]) for i in (3, 0, 2, 1)]
    minibatches = split_batch(groups, experiment(batch={"minibatches": 2}), replicas=1).shares[0].minibatches
    assert len(minibatches) == 2
    for minibatch in minibatches:
        samples = [s for microbatch in minibatch for s in microbatch]
        assert len(samples) == 4
        assert sum(float(s["token_weight"].sum()) for s in samples) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("groups, sizes", [(5, [2, 1, 2]), (3, [1, 1, 1]), (2, [1, 1]), (1, [1]), (0, [])])
def test_minibatches_of_fewer_groups_than_planned(groups, sizes):
    shares = split_batch([group(i, [1, 0]) for i in range(groups)],
                         experiment(batch={"prompts_per_step": 6, "minibatches": 3}), replicas=2).shares
    counts = [sum(len(microbatch) for share in shares for microbatch in share.minibatches[i])
              for i in range(len(sizes))]
    assert [len(share.minibatches) for share in shares] == [len(sizes)] * 2
    assert sorted(counts) == sorted(2 * size for size in sizes)
    for i in range(len(sizes)):
        weights = [s["token_weight"].sum() for share in shares for microbatch in share.minibatches[i]
                   for s in microbatch]
        assert float(sum(weights)) == pytest.approx(1.0, abs=1e-6)


def test_truncated_samples_may_be_masked_and_still_count_in_their_group():
    groups = [group(0, [1, 0, 0, 0], [2, 5, 5, 5])]
    groups[0].trajectories[1].finish_reason = "length"
    split = split_batch(groups, experiment(reward={"overlong": {"mask_truncated": True}}), replicas=1)
    samples = members(split.shares)
    assert [int(s["loss_mask"].sum()) for s in samples] == [2, 0, 5, 5]
    assert [float(s["token_weight"].sum()) for s in samples] == pytest.approx([2 / 12, 0, 5 / 12, 5 / 12])
    advantages = [e.advantage for e in estimate(experiment().algorithm, split.scored)]
    assert [float(a[-1]) for a in advantages] == pytest.approx([1.5, 0, -0.5, -0.5])  # by the mean and std of all four
    samples = members(split_batch(groups, experiment(), replicas=1).shares)
    assert [int(s["loss_mask"].sum()) for s in samples] == [2, 5, 5, 5]


def test_the_overlong_penalty_moves_advantages_but_not_accuracy():
    groups = [group(0, [1, 1])]
    groups[0].trajectories[0].overlong_penalty = -0.5
    assert [s.reward for s in split_batch(groups, experiment(), replicas=1).scored] == [0.5, 1]
    metrics = rollout_metrics(groups, Version(0, 0))
    assert metrics["rollout/accuracy"] == metrics["reward/mean"] == 1 and metrics["reward/overlong_penalty"] == -0.25
    assert metrics["rollout/groups_without_signal"] == 0


def test_an_empty_batch_has_nothing_to_say():
    assert rollout_metrics([], Version(0, 0)) == {}


def test_replicas_get_equally_many_microbatches():
    groups = [group(0, [1, 0, 1], [3, 60, 3])]
    shares = split_batch(groups, experiment(batch={"max_tokens_per_microbatch": 64}), replicas=2).shares
    assert len({len(share.microbatches) for share in shares}) == 1


def test_an_empty_completion_is_legal():
    samples = members(split_batch([group(0, [1, 0], [0, 3])], experiment(), replicas=1).shares)
    assert sum(float(s["token_weight"].sum()) for s in samples) == pytest.approx(1.0)
    assert sorted(int(s["loss_mask"].sum()) for s in samples) == [0, 3]


def test_add_field_reaches_the_samples_in_microbatch_order():
    share = split_batch([group(0, [1, 0], [2, 5])], experiment(), replicas=1).shares[0]
    samples = [s for microbatch in share.microbatches for s in microbatch]
    share.add_field("ref_log_prob", [torch.full((len(s["tokens"]),), float(i)) for i, s in enumerate(samples)])
    assert [float(s["ref_log_prob"][0]) for s in samples] == [0.0, 1.0]


def test_a_share_travels_as_one_tensor_a_field():
    groups = [group(i, [1, 0, 1], [2, 5, 1 + i]) for i in range(5)]
    batch = {"minibatches": 2, "max_tokens_per_microbatch": 64}
    shares = split_batch(groups, experiment(batch=batch), replicas=16).shares
    empty = split_batch([], experiment(), replicas=1).shares
    for share in [*shares, *empty]:
        fields = share.__getstate__()["fields"].values()
        assert all(len(flat) == sum(len(sample["tokens"]) for sample in share.samples) for flat in fields)
        arrived = pickle.loads(pickle.dumps(share))
        assert arrived.total == share.total
        assert [[len(microbatch) for microbatch in minibatch] for minibatch in arrived.minibatches] == [
            [len(microbatch) for microbatch in minibatch] for minibatch in share.minibatches]
        for sample, sent in zip(arrived.samples, share.samples, strict=True):
            assert sample.keys() == sent.keys()
            for name, value in sent.items():
                assert torch.equal(sample[name], value) and sample[name].dtype == value.dtype
    assert any(not microbatch for share in shares for microbatch in share.microbatches)  # an empty one, too


@pytest.mark.parametrize("age, lag, regenerated, fine", [
    (0, 0, False, True), (1, 1, False, True), (0, 1, False, False), (0, 1, True, True), (2, 1, False, False),
    (2, 1, True, False), (1, 0, False, False), (-1, 0, False, False)])
def test_versions_are_as_promised(age, lag, regenerated, fine):
    groups = [group(0, [1, 0], version=Version(0, 5 - age), regenerated=regenerated)]
    if fine:
        check_versions(groups, Version(1, 5), lag)
    else:
        with pytest.raises(RuntimeError, match="group 0 .* steps old"):
            check_versions(groups, Version(1, 5), lag)


def test_metrics():
    metrics = rollout_metrics([group(0, [1, 0], [2, 4]), group(1, [1, 1], [3, 3], regenerated=True)], Version(0, 1))
    rounded = rollout_metrics([group(0, [0.1 + 0.2, 0.3])], Version(0, 1))
    assert rounded["rollout/groups_without_signal"] == 1  # advantages are 0, too
    assert metrics["reward/mean"] == 0.75 and metrics["rollout/accuracy"] == 0.75
    assert metrics["rollout/response_length"] == 3 and metrics["rollout/response_length_max"] == 4
    assert metrics["rollout/groups_without_signal"] == 0.5 and metrics["rollout/groups_regenerated"] == 1
    assert metrics["rollout/version_lag"] == 1 and metrics["timing/generate_sequences"] == 2.0


def test_a_teachers_opinion_becomes_advantages_and_a_metric():
    taught = group(0, [0, 1], [2, 3])
    for t in taught.trajectories:
        t.teacher_log_prob = np.where(t.loss_mask, np.float32(-0.75), np.float32(0))  # the student's are -0.5
    exp = experiment(algorithm={"name": "distill"})
    split = split_batch([taught], exp, replicas=1)
    for sequence, t in zip(estimate(exp.algorithm, split.scored), taught.trajectories):
        assert sequence.advantage.tolist() == pytest.approx(np.where(t.loss_mask, -0.25, 0.0).tolist())
    assert rollout_metrics([taught], Version(0, 1))["distill/reverse_kl"] == pytest.approx(0.25)
    assert "distill/reverse_kl" not in rollout_metrics([group(0, [0, 1])], Version(0, 1))


@pytest.mark.parametrize("spans, seconds", [
    ([(1, 2)], 1), ([(1, 4), (2, 3)], 3), ([(5, 6), (1, 3), (2, 4)], 4), ([(1, 2), (2, 3)], 2)])
def test_a_teacher_is_busy_while_any_group_is_with_it(spans, seconds):
    groups = [group(number, [1, 0]) for number in range(len(spans))]
    assert "timing/teach_sequences" not in rollout_metrics(groups, Version(0, 1))
    for one, span in zip(groups, spans):
        one.taught = (float(span[0]), float(span[1]))
    assert rollout_metrics(groups, Version(0, 1))["timing/teach_sequences"] == seconds


def test_the_mean_of_each_part_of_the_reward_and_how_many_were_not_scored():
    groups = [group(0, [1.0, 0.0]), group(1, [0.5, 0.5])]
    for score, trajectory in zip((1.0, 0.0, 0.25, 0.75), (t for g in groups for t in g.trajectories)):
        trajectory.reward_parts = {"right": score, "short": 1.0}
        trajectory.reward_error = "right: timeout" if score < 0.5 else None
    metrics = rollout_metrics(groups, Version(0, 0))
    assert (metrics["reward/right"], metrics["reward/short"], metrics["reward/errors"]) == (0.5, 1.0, 2)
