"""Which keys of an experiment may change between the beginning of a run and its resumption. Pure.

Those that decide what is computed may not: half a run of one experiment and half of another is a run of neither.
"""
from __future__ import annotations

import json
from fnmatch import fnmatchcase
from functools import reduce
from typing import Any

from mrl.config.errors import Problem
from mrl.config.keys import leaf_keys
from mrl.config.schema import Section

MAY_DIFFER = (
    "loop.steps", "steps", "stop_below", "out", "*timeout*", "*.max_restarts", "log.*", "checkpoint.*", "eval.*", "sync.*", "trainer.env",
    "rollout.python", "rollout.args", "rollout.env", "rollout.host", "rollout.port", "rollout.workers",
    "rollout.max_concurrent_requests", "reward.processes",
)
"""Patterns of dotted keys: lengths of the run, waits, outputs, and the means by which the same thing is computed."""


def resume_problems(stored: Section, new: Section) -> list[Problem]:
    """Every key that differs although the run is to go on as the same one, in the order of the schema.

    Args:
        stored: the experiment in the run directory.
        new: the one it is to be resumed with. `cluster.device: auto` differs from nothing: it is decided by machine.
    """
    problems = []
    for key in (leaf.name for leaf in leaf_keys(type(new))):
        if any(fnmatchcase(key, pattern) for pattern in MAY_DIFFER):
            continue
        before, now = _value(stored, key), _value(new, key)
        if before == now or key == "cluster.device" and "auto" in (before, now):
            continue
        problems.append(Problem(key, _shown(now), f"{_shown(before)}, as in the run that is there",
                                "set it back to resume that run, or name another run directory for a new one"))
    return problems


def _value(experiment: Section, key: str) -> Any:
    return reduce(getattr, key.split("."), experiment)


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
