"""The `rouge` reward: overlap with a reference summary, by Google's rouge-score."""
from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mrl.reward.api import Grade, Grader, Sample
from mrl.reward.text import answer_part

try:
    from rouge_score.rouge_scorer import RougeScorer
except ImportError as error:
    raise ImportError(f"reward kind rouge needs the package rouge-score in the trainers' environment ({error}): "
                      "pip install rouge-score==0.1.2") from error

if TYPE_CHECKING:
    from mrl.config.rewards import Rouge


class RougeGrader(Grader):
    """F-measure of ROUGE-1, -2, -L (over the whole text), or their mean; between 0 and 1."""

    def __init__(self, part: Rouge):
        self._part = part
        self._names = ["rouge1", "rouge2", "rougeL"] if part.metric == "mean" else [part.metric]
        self._scorer = RougeScorer(self._names, use_stemmer=part.stemmer)

    def check(self, answer: Any, row: Mapping[str, Any]) -> None:
        if not isinstance(answer, str) or not any(character.isascii() and character.isalnum() for character in answer):
            raise ValueError(f"reference answer {answer!r} holds no word that ROUGE counts (letters a-z and digits)")

    def grade(self, sample: Sample) -> Grade:
        scores = self._scorer.score(sample.answer, answer_part(sample.response, self._part.thinking))
        return Grade(sum(scores[name].fmeasure for name in self._names) / len(self._names))
