"""Which keys of an experiment may change between the beginning of a run and its resumption. Pure.

Those that decide what is computed may not: half a run of one experiment and half of another is a run of neither.
"""
from __future__ import annotations

import json
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from mrl.config.errors import Problem
from mrl.config.section import Section

MAY_DIFFER = (
    "loop.steps", "steps", "stop_below", "out", "*timeout*", "*.max_restarts", "log.*", "checkpoint.*", "eval.*",
    "sync.*", "trainer.env", "trainer.recompute*",
    "rollout.python", "rollout.args", "rollout.env", "rollout.host", "rollout.port", "rollout.workers",
    "rollout.max_concurrent_requests", "teacher.python", "teacher.args", "teacher.env",
    "reward.processes", "reward.parts.*.url", "reward.parts.*.retries", "reward.parts.*.backoff_s",
    "reward.parts.*.max_concurrent", "reward.parts.*.api_key_env",
)
"""Patterns of dotted keys: lengths of the run, waits, outputs, and the means by which the same thing is computed."""


def resume_problems(stored: Section, new: Section) -> list[Problem]:
    """Every key that differs although the run is to go on as the same one, in the order of the schema.

    Args:
        stored: the experiment in the run directory.
        new: the one it is to be resumed with. `cluster.device: auto` differs from nothing: it is decided by machine.
    """
    problems = []
    for key, before, now in _differences(stored.model_dump(mode="json"), new.model_dump(mode="json")):
        if key == "cluster.device" and "auto" in (before, now):
            continue
        problems.append(Problem(key, _shown(now), f"{_shown(before)}, as in the run that is there",
                                "set it back to resume that run, or name another run directory for a new one"))
    return problems


def _differences(before: Any, now: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, value before, value now) wherever two trees differ and may not; null stands for a missing key."""
    if before == now or any(fnmatchcase(key, pattern) for pattern in MAY_DIFFER):
        return
    if not (isinstance(before, dict) and isinstance(now, dict)):
        yield key, before, now
        return
    for name in {**before, **now}:
        yield from _differences(before.get(name), now.get(name), f"{key}.{name}" if key else name)


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
