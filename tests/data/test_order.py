"""The prompt stream: complete, reproducible, resumable."""
import json

import pytest

from mrl.data.order import PromptOrder


def rows(draws):
    return [draw.row for draw in draws]


def test_every_epoch_has_every_row_once_and_its_own_order():
    order = PromptOrder(10, seed=1, shuffle=True)
    epochs = [order.take(10) for _ in range(3)]
    assert all(sorted(rows(epoch)) == list(range(10)) for epoch in epochs)
    assert len({tuple(rows(epoch)) for epoch in epochs}) == 3
    assert [draw.epoch for draw in epochs[2]] == [2] * 10


def test_positions_never_repeat():
    order = PromptOrder(3, seed=1, shuffle=True)
    seen = []
    for _ in range(4):
        seen += range(order.position, order.position + len(order.take(5)))
    assert seen == list(range(order.position)) == list(range(20))


def test_without_shuffling_the_order_is_the_files():
    assert rows(PromptOrder(3, seed=1, shuffle=False).take(7)) == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("taken", [0, 1, 6, 7, 8, 14, 20])
def test_a_resume_neither_repeats_nor_skips(taken, shuffle):
    """7 rows: the resume falls inside an epoch, at its last row, exactly on its end and after it."""
    whole = PromptOrder(7, seed=5, shuffle=shuffle).take(40)
    first = PromptOrder(7, seed=5, shuffle=shuffle)
    head = first.take(taken)
    second = PromptOrder(7, seed=5, shuffle=shuffle)
    second.restore(json.loads(json.dumps(first.state())))
    assert head + second.take(40 - taken) == whole


def test_batches_that_do_not_divide_the_data_cross_epochs():
    whole = PromptOrder(7, seed=5, shuffle=True).take(21)
    order = PromptOrder(7, seed=5, shuffle=True)
    assert [draw for _ in range(7) for draw in order.take(3)] == whole


def test_a_position_means_the_same_whenever_it_is_asked():
    order = PromptOrder(7, seed=5, shuffle=True)
    assert [order.at(position) for position in (20, 3, 20)] == [order.take(21)[20], order.at(3), order.at(20)]


def test_seeds_matter_and_the_order_is_pinned():
    """The literal order guards checkpoints: a change of the hash would silently reorder every resumed run."""
    assert rows(PromptOrder(20, 1, True).take(20)) != rows(PromptOrder(20, 2, True).take(20))
    assert rows(PromptOrder(8, 1, True).take(8)) == PINNED


PINNED = [1, 3, 2, 7, 0, 5, 6, 4]


@pytest.mark.parametrize("other, name", [
    (PromptOrder(8, seed=1, shuffle=True), "rows 7, this run has 8"),
    (PromptOrder(7, seed=2, shuffle=True), "seed 1, this run has 2"),
    (PromptOrder(7, seed=1, shuffle=False), "shuffle True, this run has False"),
])
def test_a_checkpoint_of_another_stream_is_refused(other, name):
    with pytest.raises(ValueError, match=name):
        other.restore(PromptOrder(7, seed=1, shuffle=True).state())


def test_an_empty_data_set_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        PromptOrder(0, seed=1, shuffle=True)
