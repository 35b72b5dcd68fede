"""The math reward: extraction rules, spellings of equal answers, and unusable reference answers."""
from types import SimpleNamespace

import pytest

from mrl.reward.api import Sample
from mrl.reward.math import MathGrader, check_gold, extract_answer, is_equal


def score(response, answer, thinking="ignore", percent="optional", units="ignore"):
    part = SimpleNamespace(thinking=thinking, percent=percent, units=units)
    return MathGrader(part).grade(Sample("", response, answer)).score


@pytest.mark.parametrize("response, expected", [
    (r"so \boxed{42}.", "42"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{\frac{1}{\sqrt{2}}} is it", r"\frac{1}{\sqrt{2}}"),
    (r"\boxed{1} no, \boxed{2} since 3 > 1", "2"),
    (r"\boxed{\boxed{7}}", "7"),
    (r"\boxed{x = \fbox{7}}", "x = 7"),
    (r"\boxed{2 + \boxed 7}", "2 + 7"),
    (r"\boxed {42}", "42"),
    (r"\boxed 42.", "42"),
    (r"$\boxed 42$", "42"),
    (r"\fbox{42}", "42"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{\left\{1, 2\right\}}", r"\left\{1, 2\right\}"),
    ("\\boxed{\n  5\n}", "5"),
])
def test_the_last_box_is_the_answer(response, expected):
    assert extract_answer(response) == expected


@pytest.mark.parametrize("response", [
    r"it is 42, so \boxed{42", r"\boxed{1} then \boxed{\frac{1}{2}", r"\boxed{}", "", "no idea", r"42 \boxed"])
def test_an_unclosed_or_empty_box_and_no_number_is_no_answer(response):
    assert extract_answer(response) is None


def test_a_command_that_starts_like_a_box_is_none():
    assert extract_answer(r"\boxedtimes{3} gives 4") == "4"


@pytest.mark.parametrize("response, expected", [
    ("She has 9 eggs left.\n#### 18", "18"),
    ("#### 17\nwait\n#### 1,234 dollars\n", "1,234 dollars"),
    ("#### 18\nThat was 5 steps.", "18"),
    (r"\boxed{3}" "\n#### 4", "3"),
])
def test_without_a_box_four_hashes_mark_it(response, expected):
    assert extract_answer(response) == expected


@pytest.mark.parametrize("response, expected", [
    ("7 + 5 is 12.", "12"),
    ("The answer is -3", "-3"),
    ("The answer is \u22123.", "-3"),
    ("12-5", "5"),
    ("x2 is 3.50 here, v1", "3.50"),
    ("It costs $1,234,567.89.", "1,234,567.89"),
    ("about 6.02e23 of them", "6.02e23"),
    ("so 25% of it", "25%"),
    ("so 3/4 of it", "3/4"),
    ("1 1/2 cups", "1 1/2"),
    (r"hence $\frac{3}{4}$", r"\frac{3}{4}"),
    ("one of 1, 2 or 3", "3"),
])
def test_without_either_the_last_number_is_it(response, expected):
    assert extract_answer(response) == expected


@pytest.mark.parametrize("gold, given", [
    ("42", "42"), ("42", "42.0"), ("42", "042"), ("0.5", r"\frac{1}{2}"), (r"\frac12", "0.5"), ("1/2", r"\dfrac{1}{2}"),
    ("-3", "\u22123"), ("-3", "\u20133"),
    ("1234", "1,234"), ("1234567", "1{,}234{,}567"), ("10080", r"10,\!080"), ("10080", r"10\,080"), ("1,234", "1234"),
    ("1234.5", "1,234.50"), (r"\frac{12}{5,\!525}", "12/5525"),
    ("18", "18 dollars"), ("18", r"\$18"), ("18", "$18"), ("5", "5 cm"), ("5", r"5\text{ cm}"),
    ("5", r"5\,\mathrm{cm}^2"),
    ("60", "60 km/h"), ("90", r"90^\circ"), ("90", "90\u00b0"), ("5", "5kg"), ("7", "7 square feet"),
    ("50", r"50\%"), (r"50\%", "50"), ("0.5", "50%"), ("50%", "50 percent"),
    ("3/2", "1 1/2"), ("3/2", r"1\frac{1}{2}"), ("-3/2", "-1 1/2"), (r"1\frac{1}{2}", "1.5"),
    (r"\{1,2\}", r"\{2, 1\}"), (r"\{1,2\}", "2, 1"), ("1,2", "2,1"),
    ("1200", "1.2e3"), ("1200", r"1.2 \times 10^3"), ("1200", "1.2\u00d710^3"), ("0.0012", "1.2e-3"),
    ("1200", "1.2E+03"),
    ("42", "x = 42"), ("42", r"\text{ }42"), ("42", "42."), ("42", "$42$"), ("42", r"\(42\)"),
    (r"2\pi", "2\u03c0"), ("x+1", "1+x"), (r"\sqrt{8}", r"2\sqrt{2}"), ("(1,2)", r"\left(1, 2\right)"),
    (r"\text{Monday}", "monday"), ("east", r"\text{East}"), ("A", "(A)"), (r"\text{(A)}", r"\text{A}"),
])
def test_the_same_answer_spelt_differently(gold, given):
    check_gold(gold)
    assert is_equal(gold, given)


@pytest.mark.parametrize("gold, given", [
    ("42", "43"), ("42", "-42"), ("42", ""), ("42", "41, 42"), ("42", "42 or 43"), ("42", r"\{41,42\}"),
    ("5", "5x"), ("5", "5i"), ("2", r"2\pi"), ("2", "2 sin"), ("1234", "1,23,4"), ("15", "1,5"),
    ("42", r"\neq 42"), ("east", "seat"), (r"\text{Monday}", r"\text{Sunday}"), ("42", "forty-two 42"),
    ("0.5", "50"), ("3/2", "1"), ("(1,2)", "(2,1)"), (r"\frac{1}{3}", "0.33"), ("1200", "1.2e2"), ("42", r"\frac{1}{"),
])
def test_different_answers(gold, given):
    assert not is_equal(gold, given)


@pytest.mark.parametrize("response, answer, expected", [
    (r"First \boxed{4}, but truly \boxed{\frac{1}{2}} of all 7 pigs.", "0.5", 1.0),
    ("2 and 2 makes\n#### 4", 4, 1.0),
    ("It is 18.", "9 + 9 = <<9+9=18>>18\n#### 18", 1.0),     # a whole solution as reference answer
    ("It is 18.", r"We get $\boxed{18}$ in 3 steps.", 1.0),
    (r"It is 18, \boxed{18", "18", 0.0),
    ("", "18", 0.0),
])
def test_scores(response, answer, expected):
    assert score(response, answer) == expected


@pytest.mark.parametrize("answer", ["", "   ", "???", r"\frac{1}{", r"\boxed{", None, True, ["1"], {"a": 1},
                                    float("nan"), float("-inf")])
def test_an_unusable_reference_answer_is_an_error_and_never_scores(answer):
    with pytest.raises(ValueError, match="reference answer"):
        check_gold(answer)
    if isinstance(answer, str):
        assert score(rf"\boxed{{{answer}}}", answer) == 0.0


def test_two_unreadable_answers_are_not_equal():
    assert not is_equal("???", "???")
