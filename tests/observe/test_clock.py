import pytest

from mrl.observe.clock import Clock


class Time:
    """Stands still until told to pass."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def passes(self, seconds):
        self.now += seconds


def test_step_is_the_sum_of_its_parts_and_nested_time_counts_once():
    time = Time()
    clock = Clock(time)
    with clock("gen"):
        time.passes(2)
        with clock("sync"):
            time.passes(3)
        time.passes(4)
    with clock("update_actor"):
        time.passes(1)
    time.passes(0.5)
    with clock("sync"):
        time.passes(1)
    assert clock.lap() == {"gen": 6, "sync": 4, "update_actor": 1, "step": 11.5, "other": 0.5}


def test_a_lap_starts_afresh_and_an_error_still_counts():
    time = Time()
    clock = Clock(time)
    with pytest.raises(ValueError):
        with clock("gen"):
            time.passes(2)
            raise ValueError
    assert clock.lap()["gen"] == 2
    time.passes(1)
    assert clock.lap() == {"step": 1, "other": 1}
