"""A Ray for a module of tests: the one that this process already has (tests/stream keeps one to the end), or its own."""
from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator

import ray


@contextmanager
def some_ray() -> Iterator[None]:
    mine = not ray.is_initialized()
    if mine:
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        yield
    finally:
        if mine:
            ray.shutdown()
