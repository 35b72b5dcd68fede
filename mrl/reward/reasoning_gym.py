"""The `reasoning_gym` reward: the scorer of the reasoning-gym task that a row comes from.

Rows come from `data.train: reasoning_gym:TASK...` (mrl/data/reasoning_gym.py), or from a file with the same columns.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mrl.reward.api import Grade, Grader, Sample
from mrl.reward.text import LONGEST_ANSWER, answer_part, last_box, last_tag

try:
    import reasoning_gym
except ImportError as error:
    raise ImportError("reward kind reasoning_gym needs the package reasoning-gym in the trainers' environment "
                      f"({error}): pip install reasoning-gym==0.1.25") from error

if TYPE_CHECKING:
    from mrl.config.rewards import ReasoningGym


class ReasoningGymGrader(Grader):
    """What the task's own scorer says of the answer, between 0 and 1."""

    def __init__(self, part: ReasoningGym):
        self._part = part

    def check(self, answer: Any, row: Mapping[str, Any]) -> None:
        metadata = row.get("metadata")
        if not isinstance(metadata, Mapping) or "source_dataset" not in metadata:
            raise ValueError("the row has no column metadata with source_dataset: it is not from reasoning-gym")
        reasoning_gym.get_score_answer_fn(metadata["source_dataset"])

    def grade(self, sample: Sample) -> Grade:
        text = answer_part(sample.response, self._part.thinking)
        given = last_tag(text, self._part.tag)
        if given is None:
            given = last_box(text)
        if given is None:
            given = text.strip()
        entry = {"question": sample.prompt, "answer": sample.answer, "metadata": sample.row["metadata"]}
        score = reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])(given or None, entry)
        return Grade(score, given[:LONGEST_ANSWER] or None)
