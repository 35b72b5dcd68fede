"""The `length` reward: from 1 at one length to 0 at another, in a straight line."""
from __future__ import annotations

from typing import TYPE_CHECKING

from mrl.reward.api import Grade, Grader, Sample

if TYPE_CHECKING:
    from mrl.config.rewards import Length


class LengthGrader(Grader):
    """(length - zero) / (full - zero), not below 0 nor above 1: `full` < `zero` rewards short responses."""

    def __init__(self, part: Length):
        self._part = part

    def grade(self, sample: Sample) -> Grade:
        length = sample.tokens if self._part.unit == "tokens" else len(sample.response)
        share = (length - self._part.zero) / (self._part.full - self._part.zero)
        return Grade(min(1.0, max(0.0, share)))
