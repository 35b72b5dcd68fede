"""The exact reward."""
import pytest

from mrl.reward.exact import check_gold, score


@pytest.mark.parametrize("response, answer, expected", [
    ("42", "42", 1.0), (" 42\n", "42", 1.0), ("42", 42, 1.0), ("42.", "42", 0.0), ("is 42", "42", 0.0),
    ("", "42", 0.0)])
def test_string_equality_once_stripped(response, answer, expected):
    assert score(response, answer) == expected


@pytest.mark.parametrize("answer", ["", "  ", None, 1.5, True, ["42"]])
def test_unusable_reference_answers(answer):
    with pytest.raises(ValueError, match="reference answer"):
        check_gold(answer)
