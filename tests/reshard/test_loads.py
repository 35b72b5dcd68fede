"""Packing and dealing boxes, and the arithmetic of boxes that they need."""
from __future__ import annotations

import random

import pytest

from mrl.reshard.boxes import cut, hull, intersection, numel, pieces_of, whole, within
from mrl.reshard.loads import deal, fill, size


def items(*shapes: tuple[int, ...]) -> list:
    return [(number, 0, whole(shape)) for number, shape in enumerate(shapes)]


def test_boxes():
    assert intersection(((0, 4), (2, 5)), ((3, 9), (0, 3))) == ((3, 4), (2, 3))
    assert intersection(((0, 4), (2, 5)), ((4, 9), (0, 3))) is None
    assert within(((1, 2), (3, 4)), ((0, 2), (3, 5))) and not within(((1, 3), (3, 4)), ((0, 2), (3, 5)))
    assert hull([((0, 1), (5, 6)), ((2, 3), (4, 5))]) == ((0, 3), (4, 6))


def test_cutting_off_the_first_rows():
    assert cut(((2, 6), (0, 10)), 25) == (((2, 4), (0, 10)), ((4, 6), (0, 10)))
    assert cut(((2, 6), (0, 10)), 9) == (None, ((2, 6), (0, 10)))
    assert cut(((2, 6), (0, 10)), 40) == (((2, 6), (0, 10)), None)
    assert cut(((2, 3), (0, 10)), 3) == (((2, 3), (0, 3)), ((2, 3), (3, 10)))
    assert cut(((2, 3), (4, 5)), 1) == (((2, 3), (4, 5)), None) and cut(((2, 3),), 0) == (None, ((2, 3),))


def test_pieces_of_a_box():
    assert pieces_of(((0, 7), (0, 3)), 9) == [((0, 2), (0, 3)), ((2, 4), (0, 3)), ((4, 7), (0, 3))]
    assert pieces_of(((0, 2), (0, 5)), 3) == [((row, row + 1), span) for row in (0, 1) for span in ((0, 2), (2, 5))]


def test_whole_tensors_fill_a_load_in_order():
    loads = fill(items((3, 2), (2, 2), (1, 2), (9, 2), (1, 1)), 10)
    assert [[number for number, *_ in load] for load in loads] == [[0, 1], [2, 3], [3], [4]]
    assert [box for load in loads for number, _, box in load if number == 3] == [((0, 4), (0, 2)), ((4, 9), (0, 2))]


def test_dealt_loads_are_even():
    assert [size(load) for load in deal(items((100, 3), (7, 3), (50, 3)), 200, 4, 1)] == [117, 117, 117, 120]
    (first, second) = deal(items((100, 3), (20, 3)), 300, 2, 1)
    assert first == ((0, 0, ((0, 60), (0, 3))),) and second == ((0, 0, ((60, 100), (0, 3))), (1, 0, ((0, 20), (0, 3))))


def test_tensors_stay_whole_where_that_is_even_enough():
    loads = deal(items(*[(10, 3)] * 8), 70, 4, 1)
    assert [[number for number, *_ in load] for load in loads] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_small_contents_are_not_dealt_thinly():
    assert len(deal(items((10, 3), (10, 3)), 1000, 8, 100)) == 1
    assert [size(load) for load in deal(items(*[(10, 3)] * 10), 1000, 8, 100)] == [99, 99, 102]
    assert len(deal(items(*[(10, 3)] * 10), 30, 8, 100)) == 10  # the limit counts more


@pytest.mark.parametrize("seed", range(40))
def test_any_contents_are_carried_once_and_in_order(seed):
    rng = random.Random(seed)
    contents = [(number, 0, whole(tuple(rng.randint(1, 12) for _ in range(rng.randint(1, 3)))))
                for number in range(rng.randint(1, 12))]
    limit, multiple = rng.randint(1, 300), rng.randint(1, 6)
    for loads in (fill(contents, limit), deal(contents, limit, multiple, rng.choice([1, 20]))):
        assert all(0 < size(load) <= limit for load in loads)
        order = [number for load in loads for number, *_ in load]
        assert order == sorted(order)
        for number, _, box in contents:
            found = [part for load in loads for other, _, part in load if other == number]
            assert sum(map(numel, found)) == numel(box) and hull(found) == box
            assert not any(intersection(a, b) for i, a in enumerate(found) for b in found[:i])
