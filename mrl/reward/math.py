"""The `math` reward: which part of a response is the answer, and whether it equals the reference answer.

Extraction, clean-up and rational numbers are plain rules of our own; comparing other expressions is math-verify's
part.
"""
from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from math import isfinite
from typing import TYPE_CHECKING, Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from mrl.reward.api import Grade, Grader, Sample
from mrl.reward.text import LONGEST_ANSWER, answer_part, has_box, last_box

if TYPE_CHECKING:
    from mrl.config.rewards import Math

# math-verify warns that its own timeouts are off. They use signal.alarm, and here the process is killed instead.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_HASHES = re.compile(r"####[ \t]*([^\n]+)")
_DECIMAL = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
_FRAC = r"\\[dt]?frac\s*\{\d+\}\s*\{\d+\}"
_QUANTITY = rf"(?:{_DECIMAL}[eE][-+]?\d+|\d+\s+\d+/\d+|(?:\d+\s*)?{_FRAC}|{_DECIMAL}(?:/{_DECIMAL})?)"
# (sign)(quantity); the dash of "12-5" is no sign, and a currency sign may stand between the two.
_NUMBER_IN_TEXT = re.compile(rf"(?<![\w.])((?<![)\]}}])-(?=[\d.\\$]))?\\?\$?(?<![\w.])({_QUANTITY}(?:\s?\\?%)?)")

# One rational number after normalisation. Powers of ten are bounded: larger ones are left to the algebra system.
_RATIONAL = re.compile(r"(-)?(?:(\d+(?:\.\d*)?|\.\d+)(?: \\times 10\^\{?(-?\d{1,3})\}?)?|(\d+) ?/ ?(\d+)"
                       r"|\\[dt]?frac ?\{(-?\d+)\} ?\{(\d+)\}|\\[dt]?frac(\d)(\d))(\\%)?")
_ROUNDING = Fraction(1, 10**6)
_REMEMBERED = 4096  # results of each kind

_CHARACTERS = str.maketrans({
    "\u2212": "-", "\u2010": "-", "\u2011": "-", "\u2012": "-", "\u2013": "-", "\ufe63": "-", "\uff0d": "-",
    "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\uff05": "%", "\u00d7": r"\times ", "\u00b7": r"\cdot ",
    "\u22c5": r"\cdot ", "\u03c0": r"\pi ", "\u221e": r"\infty ", "\u2205": r"\emptyset ", "\u00b0": "", "\u20ac": "",
    "\u00a3": ""})
_TEXT = r"\\(?:text|textrm|textbf|mathrm|mbox)\s*\{([^{}]*)\}"
_COMMAND = r"\\(?:begin|end)\s*\{[a-z]*matrix\*?\}|\\[A-Za-z]+"
_JOINING = {"and", "or"}
_NO_UNIT = {*_JOINING, "to", "not", "than", "more", "less", "most", "least"}
_BOUNDS = {"<": "lt", ">": "gt", "<=": "le", ">=": "ge", "\u2264": "le", "\u2265": "ge"}
_FUNCTIONS = {"sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sqrt", "max", "min", "lim", "det", "mod", "gcd"}
_SHORT_UNITS = {"m", "s", "g", "l", "h", "mm", "cm", "km", "mg", "kg", "ml", "ft", "in", "mi", "lb", "oz", "hr", "mph",
                "am", "pm", "yr"}


class MathGrader(Grader):
    """The answer found in the response equals the reference answer: 1, else 0."""

    def __init__(self, part: Math):
        self._part = part

    def check(self, answer: Any, row: Mapping[str, Any]) -> None:
        check_gold(answer)

    def grade(self, sample: Sample) -> Grade:
        given = extract_answer(answer_part(sample.response, self._part.thinking))
        right = given is not None and is_equal(gold_text(sample.answer), given, self._part.percent, self._part.units)
        return Grade(float(right), given)


def extract_answer(response: str) -> str | None:
    r"""The answer a response commits to, or None.

    The last outermost \boxed{...} or \fbox{...} (boxes inside it are unwrapped); a last box that never closes, or is
    empty, is no answer. Without any box the rest of the line after the last `####`; without that the last number.
    An answer of more than LONGEST_ANSWER characters is none.
    """
    if (box := last_box(response)) is not None:
        return box or None
    if lines := _HASHES.findall(response):
        answer = lines[-1].strip()
    else:
        numbers = _NUMBER_IN_TEXT.findall(response.translate(_CHARACTERS))
        answer = "".join(numbers[-1]) if numbers else ""
    return answer if 0 < len(answer) <= LONGEST_ANSWER else None


def gold_text(answer: Any) -> str:
    """The reference answer as text. A full solution (with a box or `####`) stands for the answer in it."""
    text = str(answer)
    return (extract_answer(text) or "") if has_box(text) or _HASHES.search(text) else text.strip()


def check_gold(answer: Any) -> None:
    """Raise ValueError unless the reference answer is something that a response can be compared with."""
    if not isinstance(answer, (str, int, float)) or isinstance(answer, bool):
        raise ValueError(f"reference answer {answer!r} is a {type(answer).__name__}: give a string or a number")
    if isinstance(answer, float) and not isfinite(answer):  # what an empty cell of a table may become
        raise ValueError(f"reference answer {answer!r} is not finite: give a string or a number")
    gold, _ = normalize(gold_text(answer))
    if not gold or not (_is_words(gold) or _number(gold) or _expressions(gold)):
        raise ValueError(f"reference answer {answer!r} cannot be read as mathematics or words")


# The samples of a group give few different answers.
@lru_cache(_REMEMBERED)
def is_equal(gold: str, given: str, percent: str = "optional", units: str = "ignore") -> bool:
    """Whether two answers mean the same: words by their letters, mathematics by value. A comma list is a set.

    percent, units: the policies of the part `math`.
    """
    (gold, gold_unit), (given, unit) = normalize(gold), normalize(given)
    if not gold or not given or (units == "match" and gold_unit != unit):
        return False
    if _is_words(gold) or _is_words(given):
        return _plain_words(gold) == _plain_words(given)
    if (number := _number(gold)) and (other := _number(given)):
        return _same_number(number, other, percent)
    if (_is_denial(given) and not _is_denial(gold)) or _bound(given) != _bound(gold):
        return False
    if (base := _base(gold)) and (other_base := _base(given)) and base != other_base:
        return False
    expected, found = _expressions(gold), _expressions(given)
    # An interval and its inequality are equal, whichever of them is the reference.
    return bool(expected) and bool(found) and verify(list(expected), list(found), allow_set_relation_comp=True,
                                                     timeout_seconds=None)


@lru_cache(_REMEMBERED)
def normalize(answer: str) -> tuple[str, str]:
    """(answer, unit) with one spelling for what is written in several: signs, spaces, separators, mixed numbers."""
    text = answer.translate(_CHARACTERS)
    # A comma without its usual space is a separator of thousands, wherever in a formula it stands.
    text = re.sub(r"(?<=\d)(?:\{,\}|,\\!)(?=\d{3})", "", text)
    text = text.replace(r"\$", "").replace("$", "").replace(r"\!", "").replace("{,}", ",")
    text = re.sub(r"(?<!\\)\\[()\[\]]", "", text)
    text = re.sub(r"(?<=\d)\\,(?=\d{3})", "", text)
    text = re.sub(r"(?<!\\)(?:\\[,;: ]|~)", " ", text)
    text = re.sub(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})", "", text).replace(r"\varnothing", r"\emptyset")
    text = re.sub(r"\bper\s?cent\b", "%", text).replace(r"\%", "%")
    text = re.sub(r"\s+", " ", text).strip().rstrip(".,;").strip()
    text, unit = _split_unit(text)
    return _canonical_number(text).replace("%", r"\%"), unit


def _split_unit(text: str) -> tuple[str, str]:
    """A number and the unit after it, "" for none: 5 cm, 5\\text{ cm}^2, 60 km/h, 7 square feet."""
    if match := re.fullmatch(rf"(.*[\d}}).%])\s*{_TEXT}((?:\s*\^\s*\{{?\d\}}?)?)", text):
        if not _NO_UNIT.intersection(match.group(2).split()):
            return match.group(1).strip(), _plain_unit(match.group(2) + match.group(3))
    if match := re.fullmatch(rf"(-?{_QUANTITY})(\s*)([A-Za-z][A-Za-z ./^\d]*)", text):
        words = re.findall(r"[A-Za-z]+", match.group(3))
        shortest = 1 if match.group(2) else 2
        known = all(len(word) >= 3 or (word.lower() in _SHORT_UNITS and len(word) >= shortest) for word in words)
        more = re.search(r"\s\d", match.group(3)) or _NO_UNIT.union(_FUNCTIONS).intersection(words)
        if known and not more:
            return match.group(1), _plain_unit(match.group(3))
    return text, ""


def _plain_unit(text: str) -> str:
    return re.sub(r"[\s{}.]", "", text)


def _canonical_number(text: str) -> str:
    """Thousands separators out, mixed numbers as one fraction, 1e3 as a power of ten. Only if `text` is one number."""
    sign, body = ("-", text[1:].strip()) if text.startswith("-") else ("", text.removeprefix("+"))
    percent = "%" if body.endswith("%") else ""
    body = body.removesuffix("%").strip()
    if re.fullmatch(r"\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?:\.\d+)?", body):
        body = body.replace(",", "").replace(" ", "")
    elif match := (re.fullmatch(r"(\d+) (\d+)/(\d+)", body)
                   or re.fullmatch(r"(\d+) ?\\[dt]?frac ?\{(\d+)\} ?\{(\d+)\}", body)):
        whole, numerator, denominator = map(int, match.groups())
        if denominator:
            value = whole + Fraction(numerator, denominator)
            body = rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    elif match := re.fullmatch(rf"({_DECIMAL})[eE]([-+]?\d+)", body):
        body = rf"{match.group(1).replace(',', '')} \times 10^{{{int(match.group(2))}}}"
    return sign + body + percent


def _is_words(text: str) -> bool:
    if re.fullmatch(rf"{_TEXT}", text) and re.search(r"[A-Za-z]", text.split("{", 1)[1]):
        return True
    bare = re.sub(_COMMAND, " ", text)
    return any(word.lower() not in _JOINING | _FUNCTIONS for word in re.findall(r"[^\W\d_]{3,}", bare))


def _plain_words(text: str) -> str:
    text = re.sub(_TEXT, r"\1", text)
    return " ".join(re.sub(r"[^\w\s\\+\-*/^=.]", " ", text).casefold().split())


def _is_denial(text: str) -> bool:
    return re.search(r"\\neq?(?![A-Za-z])|\u2260|!=", text) is not None


def _bound(text: str) -> str:
    r"""The comparison that an answer begins with: gt, ge, lt, le, or "". Of "\ge 7" only the 7 would be read."""
    match = re.match(r"\\([gl]eq?(?:slant)?|[gl]t)(?![A-Za-z])|(<=?|>=?|\u2264|\u2265)", text)
    return (match.group(1) or _BOUNDS[match.group(2)])[:2] if match else ""


def _base(text: str) -> str:
    """6 of "4343_6" and "4343_{6}", "" of any other answer."""
    match = re.fullmatch(r"-?[\dA-Z]+\s*_\s*(?:(\d)|\{\s*(\d+)\s*\})", text)
    return match.group(1) or match.group(2) if match else ""


def _number(text: str) -> tuple[Fraction, bool, bool] | None:
    """(value, is it a decimal, is it a percentage) of one normalised rational number; None for anything else."""
    match = _RATIONAL.fullmatch(text)
    if match is None:
        return None
    sign, decimal, exponent, *fractions, percent = match.groups()
    if decimal is not None:
        value = Fraction(decimal) * Fraction(10) ** int(exponent or 0)
    else:
        numerator, denominator = (int(digits) for digits in fractions if digits is not None)
        if denominator == 0:
            return None
        value = Fraction(numerator, denominator)
    return -value if sign else value, decimal is not None and "." in decimal, percent is not None


def _same_number(gold: tuple[Fraction, bool, bool], given: tuple[Fraction, bool, bool], policy: str) -> bool:
    (value, decimal, percent), (other, other_decimal, other_percent) = gold, given
    rounded = decimal or other_decimal
    if percent == other_percent:
        return _close(value, other, rounded)
    share, plain = (value, other) if percent else (other, value)
    return _close(share / 100, plain, rounded) or (policy == "optional" and _close(share, plain, rounded))


def _close(a: Fraction, b: Fraction, rounded: bool) -> bool:
    """Equal; or, where one was written as a decimal, equal to 6 places and 6 digits."""
    return a == b or (rounded and abs(a - b) <= _ROUNDING * min(1, max(abs(a), abs(b))))


@lru_cache(_REMEMBERED)
def _expressions(text: str) -> tuple[Any, ...]:
    """What math-verify reads in one normalised answer; () if it is no mathematics."""
    found = parse(f"${text}$", extraction_config=[LatexExtractionConfig(boxed_match_priority=-1),
                                                  ExprExtractionConfig()], parsing_timeout=None)
    return tuple(expression for expression in found if not isinstance(expression, str))
