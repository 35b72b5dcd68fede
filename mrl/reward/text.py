r"""Where in a response the answer stands: after the thinking, in a \boxed{...}, in a <tag>. Shared by several kinds.

Every function takes time linear in the text, whatever is in it.
"""
from __future__ import annotations

import re
from collections.abc import Iterator

LONGEST_ANSWER = 1000
"""Characters. More is no answer to compare, but a text that holds many."""

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_WORD = re.compile(r"[^\s$]*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def answer_part(response: str, thinking: str) -> str:
    """The part of a response in which an answer counts.

    thinking: "count", all of it; "ignore", what follows the last </think>, up to a <think> that is opened after it.
    """
    if thinking == "count":
        return response
    return response.rpartition("</think>")[2].partition("<think>")[0]


def last_box(text: str) -> str | None:
    r"""Content of the last outermost \boxed{...} or \fbox{...}, boxes inside it unwrapped; None without any box.

    "" for a box that never closes, is empty, or holds more than LONGEST_ANSWER characters.
    """
    content = None
    for content in _outermost_boxes(text):
        pass
    if content is None or len(content) > LONGEST_ANSWER:
        return None if content is None else ""
    return _unboxed(content).strip()


def has_box(text: str) -> bool:
    return _BOX.search(text) is not None


def last_tag(text: str, tag: str) -> str | None:
    """What stands in the last <tag>...</tag>; None without one that is opened and closed."""
    before, closed, _ = text.rpartition(f"</{tag}>")
    _, opened, content = before.rpartition(f"<{tag}>")
    return content.strip() if closed and opened else None


def _outermost_boxes(text: str) -> Iterator[str]:
    """Contents of each box from the left; an unclosed one yields "" and ends the search."""
    position = 0
    while match := _BOX.search(text, position):
        if not text.startswith("{", match.end()):
            # \boxed 42: without braces, the next word.
            word = _WORD.match(text, match.end())
            yield word.group().rstrip(".,;")
            position = word.end()
            continue
        end = _closing_brace(text, match.end())
        if end is None:
            yield ""
            return
        yield text[match.end() + 1:end]
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
    for match in _BRACE.finditer(text, start):
        if match.group() == "{":
            depth += 1
        elif match.group() == "}":
            depth -= 1
            if depth == 0:
                return match.start()
    return None
