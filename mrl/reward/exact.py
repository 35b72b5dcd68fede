"""The `exact` reward: the whole response is the reference answer, up to white space around it."""
from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mrl.reward.api import Grade, Grader, Sample
from mrl.reward.text import LONGEST_ANSWER, answer_part

if TYPE_CHECKING:
    from mrl.config.rewards import Exact


class ExactGrader(Grader):
    """Both are the same string once stripped: 1, else 0."""

    def __init__(self, part: Exact):
        self._part = part

    def check(self, answer: Any, row: Mapping[str, Any]) -> None:
        if isinstance(answer, bool) or not isinstance(answer, (str, int)) or not str(answer).strip():
            raise ValueError(f"reference answer {answer!r} cannot be compared as text: give a string or an integer")

    def grade(self, sample: Sample) -> Grade:
        given, gold = answer_part(sample.response, self._part.thinking).strip(), str(sample.answer).strip()
        same = given.casefold() == gold.casefold() if self._part.ignore_case else given == gold
        return Grade(float(same), given[:LONGEST_ANSWER] or None)
