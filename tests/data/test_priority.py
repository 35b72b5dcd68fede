"""Which prompts an epoch passes over, and that a resume passes over the same ones."""
import json

import pytest

from mrl.data.order import PromptOrder
from mrl.data.priority import Priority


@pytest.mark.parametrize("by, accuracy, expected", [
    ("failure", 0.0, 1.0), ("failure", 0.25, 0.75), ("failure", 1.0, 0.1), ("learnability", 0.5, 1.0),
    ("learnability", 0.25, 0.75), ("learnability", 0.0, 0.1), ("learnability", 1.0, 0.1)])
def test_probability_by_the_last_accuracy(by, accuracy, expected):
    priority = Priority(by, floor=0.1, seed=1)
    assert priority.probability(3) == 1.0  # never sampled
    priority.record(3, 0.5)
    priority.record(3, accuracy)
    assert priority.probability(3) == pytest.approx(expected)


def test_prompts_are_drawn_as_often_as_their_probability_says():
    priority = Priority("failure", floor=0.05, seed=3)
    for row, accuracy in enumerate((0.0, 0.5, 1.0)):
        priority.record(row, accuracy)
    shares = [sum(priority.draws(epoch, row) for epoch in range(4000)) / 4000 for row in range(4)]
    assert shares == pytest.approx([1.0, 0.5, 0.05, 1.0], abs=0.03)


def order(rows=6):
    return PromptOrder(rows, seed=5, shuffle=True, priority=Priority("failure", floor=0.2, seed=5))


def test_what_is_mastered_comes_up_less_often_and_the_rest_every_epoch():
    stream = order()
    for row in (0, 1):
        stream.record(row, 1.0)
    rows = [draw.row for draw in stream.take(2000)]
    counts = {row: rows.count(row) for row in range(6)}
    epochs = counts[5]
    assert all(abs(counts[row] - epochs) <= 1 for row in range(2, 6))
    assert all(0.1 < counts[row] / epochs < 0.3 for row in (0, 1))
    assert stream.position > len(rows)


def test_a_resume_draws_what_would_have_been_drawn():
    whole, first, second = order(), order(), order()
    drawn = []
    for step in range(30):
        if step == 13:
            second.restore(json.loads(json.dumps(first.state())))
        half = first if step < 13 else second
        draws = [stream.take(4) for stream in (whole, half)]
        for stream, taken in zip((whole, half), draws):
            for draw in taken:
                stream.record(draw.row, (draw.row % 3) / 2)
        drawn.append(draws[0] == draws[1])
    assert all(drawn) and whole.state() == second.state()


def test_looking_ahead_moves_nothing():
    stream = order()
    stream.record(stream.at(0).row, 1.0)
    ahead = [stream.first_from(position) for position in range(20)]
    assert stream.position == 0 and ahead == sorted(ahead)
    stream.move_to(ahead[3] + 1)
    assert stream.position == ahead[3] + 1
