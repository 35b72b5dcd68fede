"""What all kinds of reward share: the sample they judge, the grade they give, and the class they are."""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class RewardError(RuntimeError):
    """A reward cannot be started or a reference answer cannot be used: nothing could be scored."""


@dataclass(frozen=True)
class Sample:
    """One response and what it is judged by.

    prompt: as in the row, a string or a list of messages; response: the generated text without special tokens;
    answer: the reference answer; row: all columns of the prompt; tokens: sampled tokens; name: for messages.
    """

    prompt: Any
    response: str
    answer: Any
    row: Mapping[str, Any] = field(default_factory=dict)
    tokens: int = 0
    name: str = ""


class Grade(NamedTuple):
    """A score, and the answer it was given for (for people to read, and for majority votes)."""

    score: Any
    extracted: str | None = None


class Grader(ABC):
    """One part of the reward, made once in each process that scores, from the part's keys.

    Nothing in a grader bounds its time or catches its errors: that is done by whoever runs it.
    """

    def check(self, answer: Any, row: Mapping[str, Any]) -> None:
        """Raise ValueError unless responses can be compared with this reference answer."""

    @abstractmethod
    def grade(self, sample: Sample) -> Grade:
        """Score one response."""

    def grade_batch(self, samples: list[Sample]) -> list[Any]:
        """Score all responses to one prompt at once. TypeError for kinds whose parts cannot be a batch."""
        raise TypeError(f"{type(self).__name__} scores one response at a time")

    def warnings(self) -> list[str]:
        """What the user should know about how this grader runs here."""
        return []
