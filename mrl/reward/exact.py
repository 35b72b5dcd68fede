"""The `exact` reward: the whole response is the reference answer, up to white space around it."""
from __future__ import annotations

from typing import Any


def score(response: str, answer: Any) -> float:
    """1.0 if both are the same string once stripped, else 0.0."""
    return float(extract_answer(response) == str(answer).strip())


def extract_answer(response: str) -> str:
    """The answer a response commits to: all of it."""
    return response.strip()


def check_gold(answer: Any) -> None:
    """Raise ValueError unless the reference answer is a string with content or an integer."""
    if isinstance(answer, bool) or not isinstance(answer, (str, int)) or not str(answer).strip():
        raise ValueError(f"reference answer {answer!r} cannot be compared as text: give a string or an integer")
