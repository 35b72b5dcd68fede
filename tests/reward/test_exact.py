"""The exact reward."""
from types import SimpleNamespace

import pytest

from mrl.reward.api import Sample
from mrl.reward.exact import ExactGrader

GRADER = ExactGrader(SimpleNamespace(thinking="ignore", ignore_case=False))


@pytest.mark.parametrize("answer", ["", "  ", None, 1.5, True, ["42"]])
def test_unusable_reference_answers(answer):
    with pytest.raises(ValueError, match="reference answer"):
        GRADER.check(answer, {})


def test_an_endless_answer_is_not_kept_for_the_vote():
    assert len(GRADER.grade(Sample("p", "x" * 10**6, "y")).extracted) == 1000
