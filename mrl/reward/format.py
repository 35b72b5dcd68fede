"""The `format` reward: the whole response has a given form."""
from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mrl.reward.api import Grade, Grader, Sample

if TYPE_CHECKING:
    from mrl.config.rewards import Format


class FormatGrader(Grader):
    """The pattern matches the response from its first to its last character, white space around it aside: 1, else 0."""

    def __init__(self, part: Format):
        self._pattern = re.compile(part.pattern, re.DOTALL)

    def grade(self, sample: Sample) -> Grade:
        return Grade(float(self._pattern.fullmatch(sample.response.strip()) is not None))
