"""What a batch is made of, whatever order groups finish in: against a plain loop over the prompts, one at a time."""
from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.engine.api import Version
from mrl.rollout.draw import StepDraw
from mrl.rollout.types import GroupRequest
from tests.rollout.experiments import experiment
from tests.rollout.groups import group

MIXED, ALL, NONE = [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]


def draw(needed, extra=0, batches=10, **filters) -> StepDraw:
    filters = filters or {"zero_variance": True}
    return StepDraw(experiment(batch={"prompts_per_step": needed}, rollout={
        "filters": filters, "oversample": extra, "dynamic_sampling": {"max_gen_batches": batches}}), 3, Version(0, 3))


def ask(step: StepDraw) -> list[int]:
    """Draw what is wanted; the ids of the new prompts. Every other position of the stream is passed over."""
    first = len(step.requests)
    new = [2 * (first + i) for i in range(step.wanted())]
    step.requests += [GroupRequest(number, number, step.step, 2, "train") for number in new]
    return new


def finish(step: StepDraw, number: int, rewards: list[float]) -> None:
    step.add(group(number, rewards))


def test_a_rejected_group_is_replaced_at_once_and_nothing_else_is():
    step = draw(3)
    assert ask(step) == [0, 2, 4]
    finish(step, 2, MIXED)
    assert ask(step) == []
    finish(step, 4, NONE)
    assert ask(step) == [6]  # while group 0 is still being sampled
    finish(step, 6, MIXED)
    assert step.consumed is None
    finish(step, 0, MIXED)
    assert step.consumed == 4 and ask(step) == []
    assert [g.request.group_id for g in step.batch()] == [0, 2, 6]
    assert step.metrics() == {
        "filters/zero_variance": 1, "filters/accuracy_low": 0, "filters/accuracy_high": 0,
        "filters/accuracy_before": 3 * 0.5 / 4, "filters/refills": 1, "filters/groups_missing": 0,
        "filters/prompts_used": 0.75, "filters/prompts_not_needed": 0, "filters/prompts_passed_over": 3}


def test_without_filters_the_first_prompts_are_the_batch():
    step = draw(2, zero_variance=False)
    assert ask(step) == [0, 2]
    for number in (2, 0):
        finish(step, number, ALL)
    assert step.consumed == 2 and [g.request.group_id for g in step.batch()] == [0, 2]


def test_accuracy_is_the_share_of_right_samples_whatever_their_rewards():
    step = draw(1, zero_variance=False, accuracy_max=0.5)
    ask(step)
    made = group(0, [0.9, 0.4])
    for t, correct in zip(made.trajectories, (True, False)):
        t.correct = correct
    step.add(made)
    assert step.accuracy == {0: 0.5} and step.batch() == [made]


def test_what_was_drawn_to_spare_is_not_used_up():
    step = draw(2, extra=2)
    assert ask(step) == [0, 2, 4, 6]
    finish(step, 6, MIXED)  # the fastest is not the first
    finish(step, 4, NONE)
    assert ask(step) == [8]
    finish(step, 0, MIXED)
    assert step.consumed is None
    finish(step, 2, MIXED)
    assert [g.request.group_id for g in step.batch()] == [0, 2]
    assert [request.group_id for request in step.not_needed()] == [4, 6, 8]
    assert step.metrics()["filters/zero_variance"] == 0 and step.metrics()["filters/prompts_not_needed"] == 3


def test_the_limit_ends_the_drawing_with_what_there_is():
    step = draw(2, batches=2)
    for _ in range(4):
        for number in ask(step):
            finish(step, number, ALL if number else MIXED)
    assert step.consumed == 4 and step.wanted() == 0
    assert [g.request.group_id for g in step.batch()] == [0]
    assert step.metrics()["filters/groups_missing"] == 1 and step.metrics()["filters/prompts_used"] == 0.25


def test_at_the_limit_a_batch_may_be_empty():
    step = draw(1, batches=1)
    finish(step, *ask(step), ALL)
    assert step.consumed == 1 and step.batch() == [] and step.metrics()["filters/groups_missing"] == 1


@settings(max_examples=200, deadline=None)
@given(needed=st.integers(1, 5), extra=st.integers(0, 5), batches=st.integers(2, 4), data=st.data(),
       outcomes=st.lists(st.sampled_from([MIXED, ALL, NONE]), min_size=20, max_size=20))
def test_the_order_of_finishing_decides_nothing(needed, extra, batches, outcomes, data):
    extra = min(extra, (batches - 1) * needed)
    step, running, limit = draw(needed, extra, batches), [], needed * batches
    while step.consumed is None:
        running += ask(step)
        assert running, "the draw waits for nothing"
        assert len(running) + len(step.kept) <= needed + extra and len(step.requests) <= limit
        number = running.pop(data.draw(st.integers(0, len(running) - 1)))
        finish(step, number, outcomes[number // 2])

    expected, used = [], 0
    while len(expected) < needed and used < limit:
        expected += [2 * used] if outcomes[used] == MIXED else []
        used += 1
    assert [g.request.group_id for g in step.batch()] == expected
    assert [request.group_id for request in step.used()] == [2 * i for i in range(used)]
    assert step.metrics()["filters/groups_missing"] == needed - len(expected)
