"""The `math` reward: which part of a response is the answer, and whether it equals the reference answer.

Extraction and clean-up are plain rules of our own; comparing two mathematical expressions is math-verify's part.
Nothing here bounds its own time: run it in a RewardPool.
"""
from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

# math-verify warns that its own timeouts are off. They use signal.alarm, and here the process is killed instead.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_HASHES = re.compile(r"####[ \t]*([^\n]+)")
_DECIMAL = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
_FRAC = r"\\[dt]?frac\s*\{\d+\}\s*\{\d+\}"
_QUANTITY = rf"(?:{_DECIMAL}[eE][-+]?\d+|\d+\s+\d+/\d+|(?:\d+\s*)?{_FRAC}|{_DECIMAL}(?:/{_DECIMAL})?)"
# (sign)(quantity); the dash of "12-5" is no sign, and a currency sign may stand between the two.
_NUMBER_IN_TEXT = re.compile(rf"(?<![\w.])((?<![)\]}}])-(?=[\d.\\$]))?\\?\$?(?<![\w.])({_QUANTITY}(?:\s?\\?%)?)")

_CHARACTERS = str.maketrans({
    "\u2212": "-", "\u2010": "-", "\u2011": "-", "\u2012": "-", "\u2013": "-", "\ufe63": "-", "\uff0d": "-",
    "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\uff05": "%", "\u00d7": r"\times ", "\u00b7": r"\cdot ",
    "\u22c5": r"\cdot ", "\u03c0": r"\pi ", "\u221e": r"\infty ", "\u00b0": "", "\u20ac": "", "\u00a3": ""})
_TEXT = r"\\(?:text|textrm|textbf|mathrm|mbox)\s*\{([^{}]*)\}"
_JOINING = {"and", "or"}
_FUNCTIONS = {"sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sqrt", "max", "min", "lim", "det", "mod", "gcd"}
_SHORT_UNITS = {"m", "s", "g", "l", "h", "mm", "cm", "km", "mg", "kg", "ml", "ft", "in", "mi", "lb", "oz", "hr", "mph",
                "am", "pm", "yr"}


def score(response: str, answer: Any) -> float:
    """1.0 if the answer found in the response equals the reference answer, else 0.0."""
    given = extract_answer(response)
    return float(given is not None and is_equal(gold_text(answer), given))


def extract_answer(response: str) -> str | None:
    r"""The answer a response commits to, or None.

    The last outermost \boxed{...} or \fbox{...} (boxes inside it are unwrapped); a last box that never closes, or is
    empty, is no answer. Without any box the rest of the line after the last `####`; without that the last number.
    """
    boxes = list(_outermost_boxes(response))
    if boxes:
        return boxes[-1] or None
    if lines := _HASHES.findall(response):
        return lines[-1].strip() or None
    numbers = _NUMBER_IN_TEXT.findall(response.translate(_CHARACTERS))
    return "".join(numbers[-1]) if numbers else None


def gold_text(answer: Any) -> str:
    """The reference answer as text. A full solution (with a box or `####`) stands for the answer in it."""
    text = str(answer)
    return (extract_answer(text) or "") if _BOX.search(text) or _HASHES.search(text) else text.strip()


def check_gold(answer: Any) -> None:
    """Raise ValueError unless the reference answer is something that a response can be compared with."""
    if not isinstance(answer, (str, int, float)) or isinstance(answer, bool):
        raise ValueError(f"reference answer {answer!r} is a {type(answer).__name__}: give a string or a number")
    gold = normalize(gold_text(answer))
    if not gold or not (_is_words(gold) or _expressions(gold)):
        raise ValueError(f"reference answer {answer!r} cannot be read as mathematics or words")


def is_equal(gold: str, given: str) -> bool:
    """Whether two answers mean the same: words by their letters, mathematics by value.

    Units after a number do not count, a percent sign may be left out, a comma list is a set.
    """
    gold, given = normalize(gold), normalize(given)
    if not gold or not given:
        return False
    if _is_words(gold) or _is_words(given):
        return _plain_words(gold) == _plain_words(given)
    if re.fullmatch(r"-?\d+", gold) and re.fullmatch(r"-?\d+", given):
        return int(gold) == int(given)
    if _is_denial(given) and not _is_denial(gold):
        return False
    expected, found = _expressions(gold), _expressions(given)
    return bool(expected) and bool(found) and verify(expected, found, timeout_seconds=None)


def normalize(answer: str) -> str:
    """One spelling for what is written in several: signs, spaces, separators, units, mixed and scientific numbers."""
    text = answer.translate(_CHARACTERS)
    # A comma without its usual space is a separator of thousands, wherever in a formula it stands.
    text = re.sub(r"(?<=\d)(?:\{,\}|,\\!)(?=\d{3})", "", text)
    text = text.replace(r"\$", "").replace("$", "").replace(r"\!", "").replace("{,}", ",")
    text = re.sub(r"(?<!\\)\\[()\[\]]", "", text)
    text = re.sub(r"(?<=\d)\\,(?=\d{3})", "", text)
    text = re.sub(r"(?<!\\)(?:\\[,;: ]|~)", " ", text)
    text = re.sub(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})", "", text)
    text = re.sub(r"\bper\s?cent\b", "%", text).replace(r"\%", "%")
    text = re.sub(r"\s+", " ", text).strip().rstrip(".,;").strip()
    return _canonical_number(_without_unit(text)).replace("%", r"\%")


def _outermost_boxes(text: str) -> Iterator[str]:
    """Contents of each box from the left, inner boxes unwrapped; an unclosed one yields "" and ends the search."""
    position = 0
    while match := _BOX.search(text, position):
        if not text.startswith("{", match.end()):
            # \boxed 42: without braces, the next word.
            word = re.match(r"[^\s$]*", text[match.end():]).group()
            yield word.rstrip(".,;")
            position = match.end() + len(word)
            continue
        end = _closing_brace(text, match.end())
        if end is None:
            yield ""
            return
        yield _unboxed(text[match.end() + 1:end]).strip()
        position = end + 1


def _unboxed(text: str) -> str:
    """`text` without the boxes in it; what they contain stays."""
    while match := _BOX.search(text):
        end = _closing_brace(text, match.end()) if text.startswith("{", match.end()) else None
        inside = text[match.end():] if end is None else text[match.end() + 1:end] + text[end + 1:]
        text = text[:match.start()] + inside
    return text


def _closing_brace(text: str, start: int) -> int | None:
    """Index of the brace that closes the one at `start`; escaped braces are text."""
    depth = 0
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        if match.group() == "{":
            depth += 1
        elif match.group() == "}":
            depth -= 1
            if depth == 0:
                return match.start()
    return None


def _without_unit(text: str) -> str:
    if match := re.fullmatch(rf"(.*[\d}}).%])\s*{_TEXT}(?:\s*\^\s*\{{?\d\}}?)?", text):
        if match.group(2).strip() not in _JOINING:
            return match.group(1).strip()
    if match := re.fullmatch(rf"(-?{_QUANTITY})(\s*)([A-Za-z][A-Za-z ./^\d]*)", text):
        words = re.findall(r"[A-Za-z]+", match.group(3))
        shortest = 1 if match.group(2) else 2
        unit = all(len(word) >= 3 or (word.lower() in _SHORT_UNITS and len(word) >= shortest) for word in words)
        if unit and not _JOINING.union(_FUNCTIONS).intersection(words):
            return match.group(1)
    return text


def _canonical_number(text: str) -> str:
    """Thousands separators out, mixed numbers as one fraction, 1e3 as a power of ten. Only if `text` is one number."""
    sign, body = ("-", text[1:].strip()) if text.startswith("-") else ("", text.removeprefix("+"))
    percent = "%" if body.endswith("%") else ""
    body = body.removesuffix("%").strip()
    if re.fullmatch(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?", body):
        body = body.replace(",", "")
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
    bare = re.sub(r"\\[A-Za-z]+", " ", text)
    return any(word.lower() not in _JOINING | _FUNCTIONS for word in re.findall(r"[^\W\d_]{3,}", bare))


def _plain_words(text: str) -> str:
    text = re.sub(_TEXT, r"\1", text)
    return " ".join(re.sub(r"[^\w\s\\+\-*/^=.]", " ", text).casefold().split())


def _is_denial(text: str) -> bool:
    return re.search(r"\\neq?(?![A-Za-z])|\u2260|!=", text) is not None


def _expressions(text: str) -> list[Any]:
    """What math-verify reads in one normalised answer; [] if it is no mathematics."""
    found = parse(f"${text}$", extraction_config=[LatexExtractionConfig(boxed_match_priority=-1),
                                                  ExprExtractionConfig()], parsing_timeout=None)
    return [expression for expression in found if not isinstance(expression, str)]
