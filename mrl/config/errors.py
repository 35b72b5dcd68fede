"""What is wrong with an experiment, as data (`Problem`), and the exception that reports all of it at once."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class UserError(Exception):
    """An error the user can mend. The command line prints its message without a traceback and exits with code 2."""


@dataclass(frozen=True)
class Problem:
    """One violation. `value` is text as it should be shown; "" where there is none (a missing key)."""

    key: str
    value: str
    allowed: str
    remedy: str = ""
    origin: str = ""

    def __str__(self) -> str:
        where = f"{self.origin}: " if self.origin else ""
        what = f"{self.key} = {self.value}" if self.value else self.key
        lines = [f"{where}{what}", f"    allowed: {self.allowed}"]
        if self.remedy:
            lines.append(f"    remedy:  {self.remedy}")
        return "\n".join(lines)


class ConfigError(UserError):
    """What is wrong with an experiment: all its problems, or one sentence where no key is to blame.

    Attributes:
        problems: every violation found; empty for a sentence.
    """

    def __init__(self, problems: Sequence[Problem] | str):
        self.problems = [] if isinstance(problems, str) else list(problems)
        super().__init__(problems if isinstance(problems, str) else _report(self.problems))

    def __reduce__(self):
        return ConfigError, (self.problems or str(self),)


def _report(problems: Sequence[Problem]) -> str:
    head = f"{len(problems)} problem{'s' if len(problems) != 1 else ''} in the experiment:"
    return "\n".join([head, *map(str, problems)])
