"""Scoring by the reasoning-gym task that made a row."""
import pytest

from mrl.config.schema import Data
from mrl.data.prompts import load_prompts
from tests.reward.graders import grader, score

pytest.importorskip("reasoning_gym")
ROW, = load_prompts("reasoning_gym:leg_counting:size=1,seed=42", Data(train="x"))


@pytest.mark.parametrize("response, expected", [
    ("so <answer>100</answer>", 1.0), ("<answer>3</answer> no, <answer> 100 </answer>", 1.0), (r"\boxed{100}", 1.0),
    ("100", 1.0), ("<answer>100", None), ("<answer>99</answer> 100", None), ("", 0.0),
    ("<think><answer>100</answer></think>", 0.0)])
def test_the_tasks_own_scorer_judges_the_answer(response, expected):
    given = score("reasoning_gym", response, ROW["answer"], row=ROW)
    assert given == expected if expected is not None else 0.0 <= given < 1.0


def test_another_tag():
    assert score("reasoning_gym", "<final>100</final>", ROW["answer"], row=ROW, tag="final") == 1.0


@pytest.mark.parametrize("row", [{}, {"metadata": 3}, {"metadata": {}}, {"metadata": {"source_dataset": "nothing"}}])
def test_a_row_of_another_source_is_refused(row):
    with pytest.raises(ValueError):
        grader("reasoning_gym").check("100", row)
    grader("reasoning_gym").check(ROW["answer"], ROW)
