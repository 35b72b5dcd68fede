import time

import pytest

from mrl.observe.clock import Clock


def test_step_is_the_sum_of_its_parts_and_nested_time_counts_once():
    clock = Clock()
    with clock("gen"):
        time.sleep(0.02)
        with clock("sync"):
            time.sleep(0.03)
        time.sleep(0.02)
    with clock("update_actor"):
        time.sleep(0.01)
    time.sleep(0.01)
    lap = clock.lap()
    assert lap["gen"] == pytest.approx(0.04, abs=0.015)
    assert lap["sync"] == pytest.approx(0.03, abs=0.01)
    assert lap["step"] == pytest.approx(sum(lap[name] for name in ("gen", "sync", "update_actor", "other")), abs=1e-9)
    assert 0.009 < lap["other"] < 0.03


def test_a_lap_starts_afresh_and_an_error_still_counts():
    clock = Clock()
    with pytest.raises(ValueError):
        with clock("gen"):
            time.sleep(0.01)
            raise ValueError
    assert clock.lap()["gen"] >= 0.01
    assert set(clock.lap()) == {"step", "other"}
