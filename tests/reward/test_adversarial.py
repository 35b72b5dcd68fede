"""Responses made to break a grader, through the pool: each costs its own score and nothing of its neighbours'."""
import asyncio
import json

import pytest

from mrl.config.schema import Reward
from mrl.reward.api import RewardError, Sample
from mrl.reward.pool import RewardPool

LONG = 1_000_000
TESTS = json.dumps({"inputs": ["1\n"], "outputs": ["1\n"]})


@pytest.fixture
def results(request):
    """Scores responses to one prompt with a fresh pool."""
    pools = []

    def score(reward, responses, answer):
        pools.append(RewardPool(Reward.model_validate(reward)))
        return asyncio.run(pools[-1].score([Sample("p", response, answer) for response in responses]))

    yield score
    for pool in pools:
        pool.close()


ATTACKS = [
    "7" * LONG, "8 " * (LONG // 2), r"\boxed{7}" * (LONG // 9) + r"\boxed{", r"\boxed{" * (LONG // 7), "{" * LONG,
    r"\boxed{7 " + "7 " * (LONG // 2) + "}", r"\boxed 7 " * (LONG // 9) + r"\boxed{8}", "#### " * (LONG // 5),
    "1,111" * (LONG // 5), "-" * LONG, "<think>" * (LONG // 7), "answer is " * (LONG // 10), "\n" * LONG, "\\" * LONG,
    "$" * LONG, "Answer: B" + " or B" * (LONG // 5), "\ud800" + "\x00" * 100]


@pytest.mark.parametrize("kind, answer, right", [
    ("math", "7", r"\boxed{7}"), ("gsm8k", "7", "#### 7"), ("multiple_choice", "B", "Answer: B"), ("exact", "7", "7")])
def test_a_million_characters_score_nothing_and_are_read_in_time(results, kind, answer, right):
    before, *attacked, after = results({"kind": kind, "timeout_s": 30.0}, [right, *ATTACKS, right], answer)
    assert (before.reward, after.reward) == (1.0, 1.0)
    for attack, result in zip(ATTACKS, attacked, strict=True):
        assert (result.reward, result.error) == (0.0, None), attack[:20]
        assert len(result.extracted or "") <= 1000


def test_the_answer_is_found_at_the_end_of_a_million_characters(results):
    noise = r"so \boxed{3} or \frac{1}{2} and 12,345 more. " * (LONG // 45)
    assert results({"kind": "math"}, [noise + r"\boxed{7}"], "7")[0].reward == 1.0
    assert results({"kind": "gsm8k"}, [noise + "#### 7"], "7")[0].reward == 1.0


def test_expressions_without_end_are_zeros(results):
    expressions = [r"9^{9^{9^{9}}}", r"\binom{10^9}{5 \cdot 10^8}", r"\sum_{n=1}^{10^{12}} n!",
                   r"\prod_{i=1}^{10^{10}} i"]
    responses = [rf"\boxed{{{expression}}}" for expression in expressions]
    *attacked, after = results({"kind": "math", "timeout_s": 2.0, "processes": 2}, [*responses, r"\boxed{7}"], "7")
    assert [result.reward for result in attacked] == [0.0] * 4 and after.reward == 1.0


def test_a_pattern_that_backtracks_for_ever_is_ended_and_counted(results):
    reward = {"kind": "format", "pattern": "(a|aa)+b", "timeout_s": 1.0}
    before, attacked, after = results(reward, ["aab", "a" * 10_000 + "c", "ab"], "")
    assert (before.reward, after.reward) == (1.0, 1.0)
    assert attacked.reward == 0.0 and attacked.error.startswith("format: timeout: ")


def test_hostile_programs_fail_their_tests(results):
    programs = [
        "import os\nos._exit(0)", "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)", "while True:\n    pass",
        "import sys\nsys.exit(0)", "print('1' * 10**9)", "x = [0] * 10**10", "def f():\n    f()\nf()",
        "import os\nwhile True:\n    os.fork()", "raise MemoryError", "import sys\nsys.stdin.close()", "1/0",
        "open('/proc/self/mem', 'wb').write(b'1')", "__builtins__.clear()\nprint(1)"]
    responses = [f"```python\n{program}\n```" for program in [*programs, "print(input())"]]
    *attacked, honest = results({"kind": "code", "test_timeout_s": 2.0}, responses, TESTS)
    assert [(result.reward, result.error) for result in attacked] == [(0.0, None)] * len(programs)
    assert honest.reward == 1.0


def test_a_program_cannot_pass_by_forging_the_result_of_a_function(results):
    tests = json.dumps({"fn_name": "f", "inputs": [[1]], "outputs": [1]})
    programs = ["class Equal:\n    def __eq__(self, other):\n        return True\ndef f(x):\n    return Equal()",
                "import os\ndef f(x):\n    os.write(1, b'1')\n    os._exit(0)", "f = lambda x: True", "f = lambda x: 1"]
    scored = results({"kind": "code"}, [f"```python\n{program}\n```" for program in programs], tests)
    assert [result.reward for result in scored] == [0.0, 0.0, 0.0, 1.0]


def test_one_part_that_fails_leaves_the_others_their_scores(results, tmp_path):
    (tmp_path / "f.py").write_text("def f(prompt, response, answer):\n"
                                   "    return {'nan': float('nan')}.get(response, 1)\n")
    reward = {"parts": {"right": {"kind": "math", "weight": 2.0},
                        "mine": {"kind": "custom", "function": f"{tmp_path}/f.py:f", "weight": -0.5}}}
    good, broken = results(reward, ["7", "nan"], "7")
    assert (good.reward, good.parts, good.error) == (1.5, {"right": 1.0, "mine": 1.0}, None)
    assert (broken.reward, broken.parts) == (0.0, {"right": 0.0, "mine": 0.0}) and "not finite" in broken.error


def test_right_is_what_the_judging_parts_give_full_marks_whatever_the_sum(results, tmp_path):
    (tmp_path / "f.py").write_text("def f(prompt, response, answer):\n"
                                   "    return {'lost': None, '7': 0.0}.get(response, -1.0)\n")
    form = {"kind": "format", "pattern": ".*", "weight": 0.9}
    summed = {"parts": {"form": form, "number": {"kind": "math", "weight": 0.5},
                        "word": {"kind": "exact", "weight": 0.5}}}
    found = results(summed, ["7", r"\boxed{7}", "8"], "7")
    assert [(round(r.reward, 6), r.correct, r.extracted) for r in found] == [
        (1.9, True, "7"), (1.4, False, "7"), (0.9, False, "8")]
    shifted = {"parts": {"form": form, "mine": {"kind": "custom", "function": f"{tmp_path}/f.py:f"}},
               "accuracy": {"parts": ["mine"], "full_marks": 0.0}}
    found = results(shifted, ["7", "8", "lost"], "")
    assert [(round(r.reward, 6), r.correct) for r in found] == [(0.9, True), (-0.1, False), (0.9, False)]
    assert found[2].parts["mine"] == 0.0 and "mine: invalid" in found[2].error


def test_a_sum_that_no_float32_holds_is_a_fault(results, tmp_path):
    (tmp_path / "f.py").write_text("def f(prompt, response, answer):\n    return 1e300\n")
    [result] = results({"kind": "custom", "function": f"{tmp_path}/f.py:f", "weight": 1e300}, ["x"], "")
    assert result.reward == 0.0 and "too large" in result.error


def test_a_batch_is_scored_at_once_and_a_fault_in_it_is_the_samples_alone(results, tmp_path):
    (tmp_path / "f.py").write_text("async def f(prompt, responses, answer):\n"
                                   "    return [None if r == 'x' else len(r) / len(responses) for r in responses]\n")
    reward = {"kind": "custom", "function": f"{tmp_path}/f.py:f", "batch": True}
    first, broken, last = results(reward, ["abc", "x", "abcdef"], "")
    assert (first.reward, last.reward) == (1.0, 2.0) and first.error is last.error is None
    assert broken.reward == 0.0 and "NoneType" in broken.error


def test_a_batch_that_fails_is_a_fault_of_each_of_its_samples(results, tmp_path):
    (tmp_path / "f.py").write_text("def f(prompt, responses, answer):\n    return [1.0]\n")
    reward = {"kind": "custom", "function": f"{tmp_path}/f.py:f", "batch": True}
    assert [(r.reward, "1 scores for 2" in r.error) for r in results(reward, ["a", "b"], "")] == [(0.0, True)] * 2


@pytest.mark.parametrize("kind", ["rouge", "reasoning_gym"])
def test_a_missing_package_is_named_at_the_start(kind, tmp_path, monkeypatch):
    module = {"rouge": "rouge_score", "reasoning_gym": "reasoning_gym"}[kind]
    (tmp_path / f"{module}.py").write_text("raise ImportError('blocked')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pool = RewardPool(Reward(kind=kind))
    try:
        with pytest.raises(RewardError, match=f"part '{kind}'.*{module.replace('_', '-')}.*pip install"):
            asyncio.run(pool.check_answers([("7", {})]))
    finally:
        pool.close()
