"""The soft overlong penalty, by hand."""
import pytest

from mrl.algorithm.shaping import overlong_penalty


@pytest.mark.parametrize("length, expected", [
    (0, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (30000, -1.0)])
def test_dapo_s_own_numbers(length, expected):
    assert overlong_penalty(length, limit=20480, buffer=4096, penalty=1.0) == pytest.approx(expected)


def test_the_penalty_scales_and_can_be_off():
    assert overlong_penalty(90, limit=100, buffer=20, penalty=0.5) == -0.25
    assert overlong_penalty(100, limit=100, buffer=0, penalty=1.0) == 0.0
    assert overlong_penalty(50, limit=100, buffer=100, penalty=1.0) == -0.5
