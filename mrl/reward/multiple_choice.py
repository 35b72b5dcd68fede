"""The `multiple_choice` reward: the letter that a response settles on."""
from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mrl.reward.api import Grade, Grader, Sample
from mrl.reward.text import answer_part, last_box, last_tag

if TYPE_CHECKING:
    from mrl.config.rewards import MultipleChoice

_STYLE = re.compile(r"\\(?:text|textbf|mathrm|mathbf|bf|rm)\b|[${}*_`]|\\[()\[\]]")
# Before "(B)" in "answer is (B)", "**Answer**: B", "Final answer - B.", "the answer is option B".
_SAID = re.compile(r"\b(?:answer|choice|option)[*_]*(?:\s+is|\s*[:=-])[\s:*]*(?:(?:choice|option)\s+)?", re.IGNORECASE)
# One letter and perhaps the text of its choice: "B", "(B)", "B.", "B) Paris", "B: 12"; not "B or C", "Because".
_ONE = re.compile(r"\(?([A-Za-z])(?:\)|[.:)](?=\s|$)|(?![A-Za-z0-9']))\s*(.*)", re.DOTALL)
# A word and no choice: "a banana", "I think".
_WORD = re.compile(r"(?:a|I)\s+(?!because\b|since\b|as\b|is\b)[a-z]")
# A second letter: "and C", ", C", "/C", "; C or D"; not ", a city", where it begins a sentence's next word.
_OTHER = re.compile(r"[,;]?\s*(?:and\b|or\b|[/&+|])\s*\(?[A-Za-z]\b(?!')\)?(?!\w)"
                    r"|[,;]\s*\(?[A-Za-z]\)?\s*(?:$|[.,;]|and\b|or\b)", re.IGNORECASE)


class MultipleChoiceGrader(Grader):
    """The response settles on the reference answer's letter: 1, else 0."""

    def __init__(self, part: MultipleChoice):
        self._part = part
        self._letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[:part.choices]

    def check(self, answer: Any, row: Mapping[str, Any]) -> None:
        if self._gold(answer) is None:
            raise ValueError(f"reference answer {answer!r} is none of the letters {self._letters[0]}-"
                             f"{self._letters[-1]} (key choices: {self._part.choices})")

    def grade(self, sample: Sample) -> Grade:
        given = self._choice(answer_part(sample.response, self._part.thinking))
        return Grade(float(given is not None and given == self._gold(sample.answer)), given)

    def _gold(self, answer: Any) -> str | None:
        found = re.fullmatch(r"\(?([A-Za-z])\)?[.]?", answer.strip()) if isinstance(answer, str) else None
        return found.group(1).upper() if found and found.group(1).upper() in self._letters else None

    def _choice(self, text: str) -> str | None:
        """The last box, else the last <answer>, else what the last "answer is" says, else a last line that is a letter.

        Two letters are no choice.
        """
        for candidate in (last_box(text), last_tag(text, "answer")):
            if candidate is not None:
                return self._single(candidate)
        if said := list(_SAID.finditer(text)):
            return self._single(text[said[-1].end():].partition("\n")[0])
        last_line = _STYLE.sub("", text.strip().rpartition("\n")[2][:200]).strip()
        return self._single(last_line) if re.fullmatch(r"\(?[A-Za-z]\)?[.]?", last_line) else None

    def _single(self, text: str) -> str | None:
        text = _STYLE.sub("", text[:500]).strip()
        found = _ONE.fullmatch(text)
        if found is None or _WORD.match(text) or _OTHER.match(found.group(2)):
            return None
        letter = found.group(1).upper()
        return letter if letter in self._letters else None
