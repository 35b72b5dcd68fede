"""The `gsm8k` reward: one number, compared as a number. Data sets of grade-school problems end with `#### 1,234`."""
from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from mrl.reward.api import Grade, Grader, Sample
from mrl.reward.text import LONGEST_ANSWER, answer_part, last_box

if TYPE_CHECKING:
    from mrl.config.rewards import Gsm8k

_NUMBER = r"-?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\$?\.\d+"
# Emphasis, currency signs and a box may stand between the two; of 3/4 neither number is the answer.
_MARKED = re.compile(rf"####(?:[ \t*_$]|\\\$|\\boxed\s*\{{)*({_NUMBER})(?![\w,]*\d|\s*/\s*\d)")
_HASHES = re.compile(r"####")
_UNIT = r"\\?%|\\(?:text|mathrm)\{[A-Za-z. ]*\}|[A-Za-z. ]*"
_ALONE = re.compile(rf"\\?\$?({_NUMBER})\s*(?:{_UNIT})")
# The dash of "12-5" is no sign.
_LAST = re.compile(rf"(?<![\w.,])({_NUMBER})(?![\w,]*\d)")


class Gsm8kGrader(Grader):
    """The response's number equals the reference answer's: 1, else 0."""

    def __init__(self, part: Gsm8k):
        self._part = part

    def check(self, answer: Any, row: Mapping[str, Any]) -> None:
        if gold_number(answer) is None:
            raise ValueError(f"reference answer {answer!r} is no number and does not end with `#### number`")

    def grade(self, sample: Sample) -> Grade:
        text = answer_part(sample.response, self._part.thinking)
        given = number_in(text, self._part.marker == "optional")
        gold = gold_number(sample.answer)
        return Grade(float(given is not None and gold is not None and value(given) == value(gold)), given)


def number_in(text: str, unmarked: bool) -> str | None:
    """The number after the last `####`; with `unmarked` and without any mark, that in the last box, else the last."""
    text = text.replace("\u2212", "-")
    if marks := list(_HASHES.finditer(text)):
        found = _MARKED.match(text, marks[-1].start())
        return found.group(1) if found and len(found.group(1)) <= LONGEST_ANSWER else None
    if not unmarked:
        return None
    if (box := last_box(text)) is not None:
        found = _ALONE.fullmatch(box)
        return found.group(1) if found else None
    numbers = _LAST.findall(text)
    return numbers[-1] if numbers and len(numbers[-1]) <= LONGEST_ANSWER else None


def gold_number(answer: Any) -> str | None:
    """The number of a reference answer: a solution that ends with `#### number`, or the number itself."""
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        return str(answer) if math.isfinite(answer) else None
    if not isinstance(answer, str):
        return None
    if "####" in answer:
        return number_in(answer, unmarked=False)
    found = re.fullmatch(_NUMBER, answer.strip().replace("\u2212", "-"))
    return found.group() if found else None


def value(number: str) -> Decimal:
    """1,234.50 -> 1234.5"""
    return Decimal(number.replace(",", "").replace("$", ""))
