"""Prompts made by reasoning-gym."""
import pytest

from mrl.config.schema import Data
from mrl.data.prompts import DataError, load_prompts

pytest.importorskip("reasoning_gym")


def rows(source):
    return load_prompts(source, Data(train=source, prompt_key="question", answer_key="gold"))


def test_the_same_source_gives_the_same_rows_with_what_their_scorer_needs():
    first, again = (rows("reasoning_gym:leg_counting:size=5,seed=7") for _ in range(2))
    assert first == again and len(first) == 5
    assert first != rows("reasoning_gym:leg_counting:size=5,seed=8")
    assert first[0]["metadata"]["source_dataset"] == "leg_counting" and first[0]["gold"].isdigit()
    assert "legs" in first[0]["question"]


def test_options_of_the_task():
    animals = [row["metadata"]["num_animals"] for row in rows(
        "reasoning_gym:leg_counting:size=20,min_animals=2,max_animals=2")]
    assert animals == [2] * 20


@pytest.mark.parametrize("source, words", [
    ("reasoning_gym:leg_conting", "no task 'leg_conting'"),
    ("reasoning_gym:leg_counting:size", "not of the form name=value"),
    ("reasoning_gym:leg_counting:legs=4", "refuses .*legs"),
    ("reasoning_gym:leg_counting:min_animals=9,max_animals=2", "refuses"),
])
def test_mistakes_are_named(source, words):
    with pytest.raises(DataError, match=words):
        rows(source)
