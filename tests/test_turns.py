"""Whose turn it is: what trainers and engines give up, take and hold in every phase, over a stand-in for a GPU."""
import pytest

from mrl.observe.clock import Clock
from mrl.turns import Turns

PARTS = {"weights": 4, "optimizer": 12}


class Device:
    """A GPU, the policy's Offload on it, and its engines: writes down who takes and gives what, and who holds what."""

    def __init__(self):
        self.said, self.held = [], {"weights", "optimizer"}

    def memory(self):
        return {"peak": 2.0}

    def start_peak(self):
        self.said.append("peak")

    def used_beside(self):
        return 3_000_000_000

    def release_cache(self):
        self.said.append("cache freed")

    # the policy's Offload

    def release(self, *parts):
        self.said += [f"-{part}" for part in parts]
        gone = self.held & {*parts}
        self.held -= gone
        return sum(PARTS[part] for part in gone)

    def restore(self, *parts):
        assert "engine kv_cache" not in self.held
        self.said += [f"+{part}" for part in parts if part not in self.held]
        back = {*parts} - self.held
        self.held |= back
        return sum(PARTS[part] for part in back)

    # the engines

    def sleep(self):
        self.said.append("engines sleep")
        self.held -= {"engine weights", "engine kv_cache"}

    def wake(self, part):
        assert "optimizer" not in self.held and (part == "weights" or "weights" not in self.held)
        self.said.append(f"engines {part}")
        self.held.add(f"engine {part}")


def turns(device, offload=True, sleeps=True, rank=0):
    clock = Clock()
    return Turns(device, device if offload else None, sleeps, lambda: device.said.append("meet"),
                 device if rank == 0 else None, clock), clock


def test_a_step_hands_memory_over_and_back():
    device = Device()
    mine, clock = turns(device)
    mine.to_push()
    assert device.said == ["-optimizer", "cache freed", "meet", "engines weights", "meet"]
    assert device.held == {"weights", "engine weights"}
    device.said.clear()
    mine.to_generate()
    assert device.said == ["-weights", "cache freed", "meet", "engines kv_cache", "meet"]
    assert device.held == {"engine weights", "engine kv_cache"}
    device.said.clear()
    mine.to_train()
    assert device.said == ["engines sleep", "meet", "+weights", "+optimizer"]
    assert device.held == {"weights", "optimizer"}
    assert mine.metrics() == {"memory/peak_gb": 2 * 2**30 / 1e9, "memory/offload_gb": 16e-9, "memory/onload_gb": 16e-9,
                              "memory/beside_gb": 3.0}
    assert device.said[-1] == "peak" and mine.metrics()["memory/offload_gb"] == 0
    assert clock.seconds.keys() == {"offload", "onload", "sleep", "wake"}


def test_a_push_in_the_engines_turn_takes_back_what_it_needs():
    device = Device()
    mine, _ = turns(device)
    mine.to_push()
    mine.to_generate()
    device.said.clear()
    mine.to_push()
    assert device.said == ["engines sleep", "meet", "+weights", "meet", "engines weights", "meet"]
    mine.to_generate()
    mine.to_train()
    assert device.held == {"weights", "optimizer"}


def test_ranks_without_engines_meet_as_often():
    said = []
    for rank in (0, 1):
        device = Device()
        device.held.clear()
        mine, _ = turns(device, rank=rank)
        for turn in (mine.to_push, mine.to_generate, mine.to_push, mine.to_generate, mine.to_train):
            turn()
        said.append(device.said)
    assert said[1] == [word for word in said[0] if not word.startswith("engines")]


@pytest.mark.parametrize("offload, sleeps, left", [
    (False, False, []), (False, True, ["engines sleep", "meet", "meet", "engines weights", "meet"]),
    (True, False, ["+weights"])])
def test_either_side_may_keep_its_memory(offload, sleeps, left):
    device = Device()
    device.wake = lambda part: device.said.append(f"engines {part}")
    mine, clock = turns(device, offload, sleeps)
    mine.to_push()
    mine.to_generate()
    device.said.clear()
    mine.to_push()
    assert device.said == left
    assert bool(clock.seconds) == (offload or sleeps)
    assert ("memory/beside_gb" in mine.metrics()) == sleeps
