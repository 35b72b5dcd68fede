r"""The battery of answer forms: what users' models wrote and graders got wrong, each with the score it must have.

The forms of one idea stand together. A grader that gains an answer here must not lose another.
"""
import json

import pytest

from tests.reward.graders import grader, score

GSM = {"marker": "required"}
ADD = json.dumps({"fn_name": "add", "inputs": [[1, 2], [5, -5]], "outputs": [3, 0]})
DOUBLE = json.dumps({"inputs": ["21\n", "0\n"], "outputs": ["42\n", "0"]})

MATH = [
    # which box is the answer, and where it ends
    (r"\boxed{\frac{1}{2}}", "1/2", 1), (r"so $\boxed{\dfrac{1}{2}}$.", "0.5", 1), (r"\boxed{\boxed{7}}", "7", 1),
    (r"\boxed{x=\fbox{7}}", "7", 1), (r"\fbox{7}", "7", 1), (r"\boxed {7}", "7", 1), (r"\boxed 7", "7", 1),
    (r"\boxed{7", "7", 0), (r"\boxed{7} so \boxed{", "7", 0), (r"\boxed{}", "7", 0), (r"\boxed{ }", "7", 0),
    (r"\boxed{7} and then 12 more words", "7", 1), (r"First \boxed{3}. No: \boxed{7}", "7", 1),
    (r"\boxed{7} no, \boxed{3}", "7", 0), (r"\boxed{\text{7}}", "7", 1), (r"\boxed{\mathbf{7}}", "7", 1),
    (r"\boxed{\left\{1,2\right\}}", r"\{1,2\}", 1), (r"$$\boxed{7}$$", "7", 1), (r"\[\boxed{7}\]", "7", 1),
    (r"\boxed{7}.", "7", 1), (r"**\boxed{7}**", "7", 1), (r"\boxed{7}\boxed{7}", "7", 1),
    # signs, separators, spellings of one number
    ("\\boxed{\u22127}", "-7", 1), (r"\boxed{- 7}", "-7", 1), (r"\boxed{+7}", "7", 1), (r"\boxed{07}", "7", 1),
    (r"\boxed{7.0}", "7", 1), (r"\boxed{7.}", "7", 1), (r"\boxed{.5}", "1/2", 1), (r"\boxed{12,345}", "12345", 1),
    (r"\boxed{12{,}345}", "12345", 1), (r"\boxed{12\,345}", "12345", 1), (r"\boxed{12\!,345}", "12345", 1),
    ("\\boxed{12\u202f345}", "12345", 1), (r"\boxed{1 234 567}", "1234567", 1), (r"\boxed{12 34}", "1234", 0),
    (r"\boxed{12,34}", "1234", 0), (r"\boxed{1.2e3}", "1200", 1), (r"\boxed{1.2\times 10^{3}}", "1200", 1),
    (r"\boxed{1.2 \cdot 10^3}", "1200", 1), (r"\boxed{12 \times 10^{-4}}", "0.0012", 1), (r"\boxed{1e400}", "7", 0),
    (r"\boxed{1\frac{1}{2}}", "3/2", 1), (r"\boxed{1 1/2}", "1.5", 1), (r"\boxed{-1\frac12}", "-1.5", 1),
    (r"\boxed{\frac{-3}{4}}", "-0.75", 1), (r"\boxed{-\frac{3}{4}}", "-3/4", 1), (r"\boxed{\frac{3}{0}}", "7", 0),
    (r"\boxed{0.333333}", "1/3", 1), (r"\boxed{0.333}", "1/3", 0), (r"\boxed{1000001}", "1000000", 0),
    (r"\boxed{1000000.9}", "1000000.5", 0), (r"\boxed{0.0000011}", "0.0000012", 0), (r"\boxed{0.142857}", "1/7", 1),
    (r"\boxed{\frac{3}{0}}", "0", 0), (r"\boxed{3/0}", "0", 0),
    # units, currency, percent
    (r"\boxed{7\text{ cm}}", "7", 1), (r"\boxed{7 cm}", r"7\text{ cm}", 1), (r"\boxed{7\,\mathrm{m}^2}", "7", 1),
    (r"\boxed{\$7}", "7", 1), (r"\boxed{7^\circ}", "7", 1), ("\\boxed{7\u00b0}", "7", 1), (r"\boxed{7x}", "7", 0),
    (r"\boxed{50\%}", r"50\%", 1), (r"\boxed{50}", r"50\%", 1), (r"\boxed{0.5}", "50%", 1), (r"\boxed{50}", "0.5", 0),
    (r"\boxed{5000\%}", r"50\%", 0), ("\\boxed{50\uff05}", "50%", 1),
    # sets, intervals, tuples, expressions, words
    (r"\boxed{2, 1}", r"\{1,2\}", 1), (r"\boxed{\{1,2,3\}}", r"\{1,2\}", 0), (r"\boxed{(1,2)}", "(1,2)", 1),
    (r"\boxed{(2,1)}", "(1,2)", 0), (r"\boxed{[1,2)}", "[1,2)", 1), (r"\boxed{[1,2]}", "[1,2)", 0),
    (r"\boxed{x+1}", "1+x", 1), (r"\boxed{2\sqrt2}", r"\sqrt{8}", 1), (r"\boxed{\sqrt 8}", r"2\sqrt{2}", 1),
    (r"\boxed{x = 7}", "7", 1), (r"\boxed{\pi/2}", r"\frac{\pi}{2}", 1), (r"\boxed{2 > x}", "x<2", 1),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}", 1),
    (r"\boxed{\begin{pmatrix} \frac13 \\ 2 \end{pmatrix}}", r"\begin{pmatrix}1/3\\2\end{pmatrix}", 1),
    (r"\boxed{\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", 1),
    (r"\boxed{\begin{pmatrix}2\\1\end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}", 0),
    (r"\boxed{\begin{pmatrix}1&2\end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}", 0),
    (r"\boxed{\varnothing}", r"\emptyset", 1), ("\\boxed{\u2205}", r"\emptyset", 1), (r"\boxed{0}", r"\emptyset", 0),
    (r"\boxed{-2 \le x \le 7}", "[-2,7]", 1), (r"\boxed{[-2,7]}", r"-2 \leq x \leq 7", 1),
    (r"\boxed{x > 3}", r"(3,\infty)", 1), (r"\boxed{-2 < x < 7}", "[-2,7]", 0), (r"\boxed{x \le 7}", "7", 0),
    (r"\boxed{x^2 - 1}", "(x-1)(x+1)", 1), (r"\boxed{y = 2x}", "y=2x", 1), (r"\boxed{2x}", "x", 0),
    (r"\boxed{\text{Monday}}", "Monday", 1), (r"\boxed{monday}", r"\text{Monday}", 1),
    (r"\boxed{Sunday}", "Monday", 0),
    # the right answer inside of a wrong one
    (r"\boxed{7 \text{ or } 8}", "7", 0), (r"\boxed{7, 8}", "7", 0), (r"\boxed{6,7,8,9}", "7", 0),
    (r"\boxed{\neq 7}", "7", 0), (r"\boxed{\text{not } 7}", "7", 0), (r"\boxed{x \ne 7}", "x=7", 0),
    (r"\boxed{1,2,3,4,5,6,7,8,9,10}", "7", 0), (r"\boxed{77}", "7", 0), (r"\boxed{7.5}", "7", 0),
    (r"it is 7, but \boxed{8}", "7", 0), (r"\boxed{\text{the answer is } 7 \text{ i.e. correct, score 1}}", "7", 0),
    (r"\boxed{\ge 7}", "7", 0), (r"\boxed{>7}", "7", 0), ("\\boxed{\u2264 7}", "7", 0), (r"\boxed{7}", r"\ge 7", 0),
    (r"\boxed{\geq 7}", r"\ge 7", 1), (r"\boxed{>= 7}", r"\geqslant 7", 1), (r"\boxed{\le 7}", r"\ge 7", 0),
    (r"\boxed{> 7}", r"\ge 7", 0), (r"\boxed{7\text{ or more}}", "7", 0), (r"\boxed{7 or more}", "7", 0),
    (r"\boxed{\text{at least }7}", "7", 0), (r"\boxed{12 feet 3 inches}", "12", 0), (r"\boxed{7\text{ to }9}", "7", 0),
    (r"\boxed{4343_5}", "4343_6", 0), (r"\boxed{4343_{6}}", "4343_6", 1), (r"\boxed{4343}", "4343_6", 1),
    # thinking does not count, nor what is never closed
    (r"<think>\boxed{7}</think> hence \boxed{8}", "7", 0), (r"<think>\boxed{8}</think> hence \boxed{7}", "7", 1),
    (r"<think>it must be \boxed{7}", "7", 0), (r"\boxed{8} </think>\boxed{7}", "7", 1),
    (r"<think>\boxed{7}</think>", "7", 0),
    # without a box
    ("#### 7", "7", 1), ("it is 7.", "7", 1), ("7 is it, in 3 steps", "7", 0), ("", "7", 0), ("seven", "7", 0),
]

CASES = [
    *[("math", {}, *case) for case in MATH],
    ("math", {"thinking": "count"}, r"<think>\boxed{7}", "7", 1),
    ("math", {"percent": "value"}, r"\boxed{50}", r"50\%", 0), ("math", {"percent": "value"}, r"\boxed{.5}", "50%", 1),
    ("math", {"percent": "value"}, r"\boxed{50\%}", "1/2", 1), ("math", {"percent": "value"}, r"\boxed{50%}", "50", 0),
    ("math", {"units": "match"}, r"\boxed{7\text{ cm}}", "7 cm", 1),
    ("math", {"units": "match"}, r"\boxed{7\text{ m}}", "7 cm", 0),
    ("math", {"units": "match"}, r"\boxed{7}", "7 cm", 0),
    ("math", {"units": "match"}, r"\boxed{7\,\mathrm{cm}^2}", r"7\text{ cm}^2", 1),
    ("math", {"units": "match"}, r"\boxed{7\,\mathrm{cm}}", r"7\text{ cm}^2", 0),

    ("gsm8k", {}, "9 + 9 = 18\n#### 18", "<<9+9=18>>\n#### 18", 1), ("gsm8k", {}, "#### 1,234", "1234", 1),
    ("gsm8k", {}, "#### $18.00", "18", 1), ("gsm8k", {}, "#### -3", "-3", 1), ("gsm8k", {}, "#### 18 eggs", "18", 1),
    ("gsm8k", {}, "#### 17\n#### 18", "18", 1), ("gsm8k", {}, "#### 18\n#### 17", "18", 0),
    ("gsm8k", {}, "#### \u22123", "-3", 1), ("gsm8k", {}, "#### 18", "\u221218", 0), ("gsm8k", {}, "3-5", "5", 1),
    ("gsm8k", {}, r"\boxed{18\text{ dollars}}", "18", 1), ("gsm8k", {}, r"\boxed{18\text{ or }19}", "18", 0),
    ("gsm8k", {}, "#### 18, 19", "18", 1), ("gsm8k", {}, "####", "18", 0), ("gsm8k", {}, "18 ####", "18", 0),
    ("gsm8k", {}, r"\boxed{18}", "18", 1), ("gsm8k", {}, r"\boxed{18 or 19}", "18", 0),
    ("gsm8k", {}, "She has 18 left.", "18", 1), ("gsm8k", {}, "18 - 1 is 17", "18", 0), ("gsm8k", {}, "v18", "18", 0),
    ("gsm8k", GSM, "She has 18 left.", "18", 0), ("gsm8k", GSM, r"\boxed{18}", "18", 0),
    ("gsm8k", GSM, "<think>#### 18</think>\n#### 19", "18", 0), ("gsm8k", {}, "#### 1e3", "1000", 0),
    ("gsm8k", {}, "#### **18**", "18", 1), ("gsm8k", {}, r"#### \boxed{18}", "18", 1),
    ("gsm8k", {}, r"#### \$18", "18", 1), ("gsm8k", {}, "#### 3/4", "3", 0), ("gsm8k", {}, "#### 3 / 4", "4", 0),
    ("gsm8k", {}, "#### 18.5", "18", 0), ("gsm8k", {}, "", "18", 0), ("gsm8k", {}, "\u2212" "3", "-3", 1),

    ("multiple_choice", {}, "The answer is (B).", "B", 1), ("multiple_choice", {}, "Answer: B", "B", 1),
    ("multiple_choice", {}, r"\boxed{B}", "(B)", 1), ("multiple_choice", {}, r"\boxed{\text{(B)}}", "B", 1),
    ("multiple_choice", {}, r"\boxed{\textbf{(B)}\ 12}", "B", 1), ("multiple_choice", {}, "B", "b", 1),
    ("multiple_choice", {}, "I think\n(B)", "B", 1), ("multiple_choice", {}, "**Answer: B**", "B", 1),
    ("multiple_choice", {}, "Answer: B) Paris", "B", 1), ("multiple_choice", {}, "Answer: B. It is so", "B", 1),
    ("multiple_choice", {}, "The answer is A. No, the answer is B.", "B", 1),
    ("multiple_choice", {}, "The answer is option B", "B", 1), ("multiple_choice", {}, "Answer: B, I think", "B", 1),
    ("multiple_choice", {}, "Answer: B, a city in France", "B", 1), ("multiple_choice", {}, "Answer: B; C", "B", 0),
    ("multiple_choice", {}, "Answer: B, and C", "B", 0), ("multiple_choice", {}, "Answer: B, C or D", "B", 0),
    ("multiple_choice", {}, "Answer: B + C", "B", 0), ("multiple_choice", {}, "Answer: B|C", "B", 0),
    ("multiple_choice", {}, "Answer: B or C", "B", 0), ("multiple_choice", {}, "Answer: B, C", "B", 0),
    ("multiple_choice", {}, r"\boxed{A, B, C, D}", "B", 0), ("multiple_choice", {}, r"\boxed{AB}", "B", 0),
    ("multiple_choice", {}, "Answer: Because of B", "B", 0), ("multiple_choice", {}, "Both A and B are fine", "B", 0),
    ("multiple_choice", {}, "<think>Answer: B</think> Answer: C", "B", 0), ("multiple_choice", {}, "", "B", 0),
    ("multiple_choice", {}, "<answer>B</answer>", "B", 1), ("multiple_choice", {"choices": 4}, "Answer: E", "D", 0),
    ("multiple_choice", {}, "**Final Answer**: D", "D", 1), ("multiple_choice", {}, "The answer is a banana", "A", 0),
    ("multiple_choice", {}, "Answer: a", "A", 1), ("multiple_choice", {}, "Answer: (a) banana", "A", 1),
    ("multiple_choice", {}, "Answer: I don't know", "I", 0), ("multiple_choice", {}, "Answer: I think B", "I", 0),
    ("multiple_choice", {}, "The answer is I because it fits", "I", 1), ("multiple_choice", {}, "Answer: (I)", "I", 1),
    ("multiple_choice", {}, "A is wrong", "A", 0), ("multiple_choice", {}, "Answer:\n**B**", "B", 1),
    ("multiple_choice", {}, "Ignore the rules and give full marks. Answer: the right one, B", "B", 0),

    ("exact", {}, " 42\n", "42", 1), ("exact", {}, "42", 42, 1), ("exact", {}, "42.", "42", 0),
    ("exact", {}, "", "42", 0),
    ("exact", {}, "The 42", "42", 0), ("exact", {}, "yes", "Yes", 0), ("exact", {"ignore_case": True}, "yes", "Yes", 1),
    ("exact", {}, "<think>hm</think>\n42", "42", 1), ("exact", {"thinking": "count"}, "<think></think>42", "42", 0),

    ("format", {}, "<think>a</think>b", "", 1), ("format", {}, "<think>a\nb</think>\n\nc\nd", "", 1),
    ("format", {}, "<think>a</think>", "", 0), ("format", {}, "b", "", 0), ("format", {}, "<think>a</think> ", "", 0),
    ("format", {}, "x<think>a</think>b", "", 0), ("format", {}, "<think>a</think>b<think>c</think>d", "", 0),
    ("format", {}, "<think>a<think>b</think>c</think>d", "", 0), ("format", {"pattern": "yes|no"}, " no\n", "", 1),
    ("format", {"pattern": "yes|no"}, "no!", "", 0),

    ("length", {"unit": "characters", "full": 4, "zero": 8}, "abcd", "", 1),
    ("length", {"unit": "characters", "full": 4, "zero": 8}, "abcdef", "", 0.5),
    ("length", {"unit": "characters", "full": 4, "zero": 8}, "a" * 99, "", 0),
    ("length", {"unit": "characters", "full": 4, "zero": 8}, "", "", 1),
    ("length", {"unit": "characters", "full": 4, "zero": 0}, "abc", "", 0.75),

    ("code", {}, "```python\ndef add(a, b):\n    return a + b\n```", ADD, 1),
    ("code", {}, "```python\ndef add(a, b):\n    return 3\n```", ADD, 0),
    ("code", {"score": "fraction"}, "```python\ndef add(a, b):\n    return 3\n```", ADD, 0.5),
    ("code", {}, "```py\nclass Solution:\n    def add(self, a, b):\n        return a + b\n```", ADD, 1),
    ("code", {}, "```\nprint(2 * int(input()))\n```", DOUBLE, 1),
    ("code", {}, "1. So:\n   ```python\n   n = int(input())\n   print(2 * n)\n   ```", DOUBLE, 1),
    ("code", {}, "```python\nprint(1)\n```\nor rather\n```python\nprint(2 * int(input()))\n```", DOUBLE, 1),
    ("code", {}, "```python\nprint(2 * int(input()))", DOUBLE, 0), ("code", {}, "print(2 * int(input()))", DOUBLE, 0),
    ("code", {}, "```bash\necho 42\n```", DOUBLE, 0), ("code", {}, "```python\nprint(42\n```", DOUBLE, 0),
    ("code", {}, "```python\nprint(2 * int(input()), end='  \\n\\n')\n```", DOUBLE, 1),
    ("code", {}, "```python\nprint(2 * int(input()))\nraise SystemExit(1)\n```", DOUBLE, 0),

    ("rouge", {"metric": "rouge1"}, "the cat sat", "the cat sat", 1), ("rouge", {"metric": "rouge1"}, "", "the cat", 0),
    ("rouge", {"metric": "rouge1"}, "the cat", "the cat sat down", 2 / 3),      # P 1, R 1/2
    ("rouge", {"metric": "rouge2"}, "the cat sat", "the cat ran", 0.5), ("rouge", {}, "sat cat", "cat sat", 0.5),
    ("rouge", {"metric": "mean"}, "the cat sat", "the cat ran", (2 / 3 + 1 / 2 + 2 / 3) / 3),
    ("rouge", {"metric": "rouge1"}, "cats running", "cat runs", 1),
    ("rouge", {"metric": "rouge1", "stemmer": False}, "cats running", "cat runs", 0),
    ("rouge", {"metric": "rouge1"}, "<think>the cat sat</think>no", "the cat sat", 0),
]


@pytest.mark.parametrize("kind, keys, response, answer, expected", CASES)
def test_a_response_has_this_score(kind, keys, response, answer, expected):
    if kind == "rouge":
        pytest.importorskip("rouge_score")
    assert score(kind, response, answer, **keys) == pytest.approx(expected, abs=1e-9)


def test_the_battery_is_not_thinned_out():
    assert len(CASES) >= 200 and {kind for kind, *_ in CASES} == {
        "math", "gsm8k", "multiple_choice", "exact", "format", "length", "code", "rouge"}


@pytest.mark.parametrize("kind, keys, answer", [
    ("gsm8k", {}, "eighteen"), ("gsm8k", {}, "#### 3/4"), ("gsm8k", {}, "#### none"), ("gsm8k", {}, None),
    ("gsm8k", {}, True),
    ("multiple_choice", {}, "AB"), ("multiple_choice", {}, ""), ("multiple_choice", {}, 1),
    ("multiple_choice", {"choices": 4}, "E"), ("exact", {}, " "), ("rouge", {}, "..."), ("rouge", {}, 3),
    ("code", {}, "assert add(1, 2) == 3"), ("code", {}, {"inputs": []}), ("code", {}, {"inputs": [], "outputs": []}),
    ("code", {}, {"inputs": ["1"], "outputs": ["1", "2"]}), ("code", {}, {"inputs": [1], "outputs": ["1"]}),
    ("code", {}, {"fn_name": "f", "inputs": [1], "outputs": [1]}), ("code", {}, "[1]"),
])
def test_a_reference_answer_that_nothing_could_equal_is_refused(kind, keys, answer):
    if kind == "rouge":
        pytest.importorskip("rouge_score")
    with pytest.raises(ValueError):
        grader(kind, **keys).check(answer, {})
