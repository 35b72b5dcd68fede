"""Waiting in tests for what other threads and processes do."""
import time
from typing import Callable


def wait_until(condition: Callable[[], object], seconds: float = 100.0) -> None:
    """AssertionError when it has not come true by then."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.01)
