"""Prompts of the reasoning-gym package, which makes them up: any number, from a seed."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

PREFIX = "reasoning_gym:"
DEFAULTS = {"size": 1000, "seed": 1}


def make_rows(source: str, prompt_key: str, answer_key: str) -> Iterator[dict[str, Any]]:
    """Rows of 'reasoning_gym:TASK[:option=value,...]' with the question, the answer and `metadata`.

    Options are those of the task (its difficulty), besides size and seed; values are YAML. The same source always
    gives the same rows. A task whose questions have many right answers gives the answer "".

    Raises:
        ImportError: the package is not installed. ValueError: unknown task or option, naming it.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ImportError(f"it needs the package reasoning-gym ({error}): pip install reasoning-gym==0.1.25") from error
    task, _, options = source.removeprefix(PREFIX).partition(":")
    if task not in DATASETS:
        raise ValueError(f"reasoning-gym has no task {task!r}; it has {', '.join(sorted(DATASETS))}")
    settings = dict(DEFAULTS)
    for option in filter(None, options.split(",")):
        name, equals, value = option.partition("=")
        if not equals:
            raise ValueError(f"the option {option!r} is not of the form name=value")
        settings[name.strip()] = yaml.safe_load(value)
    try:
        entries = reasoning_gym.create_dataset(task, **settings)
    except (TypeError, AssertionError, ValueError) as error:
        raise ValueError(f"reasoning-gym refuses {settings} for {task}: {error}") from error
    for entry in entries:
        yield {prompt_key: entry["question"], answer_key: entry["answer"] or "", "metadata": entry["metadata"]}
