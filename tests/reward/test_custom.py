"""Loading a user's reward function."""
import sys
from types import SimpleNamespace

import pytest

from mrl.reward.api import Sample
from mrl.reward.custom import CustomGrader, load


def grader(function, batch=False):
    return CustomGrader(SimpleNamespace(function=function, batch=batch))


def score(function, row):
    return grader(function).grade(Sample("p", "r", "a", row)).score


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(source, name="rewards.py"):
        (tmp_path / name).write_text(source)
        return str(tmp_path / name)

    return write


def test_it_gets_prompt_response_answer_and_the_row(write):
    file = write("def reward(prompt, response, answer, **row):\n    return [prompt, response, answer, row]\n")
    row = {"prompt": "p", "answer": "a", "level": 3, "subject": "algebra"}
    assert score(f"{file}:reward", row) == ["p", "r", "a", {"level": 3, "subject": "algebra"}]


def test_it_may_name_only_the_columns_it_wants(write):
    file = write("def reward(prompt, response, answer, level):\n    return level\n"
                 "def plain(prompt, response, answer):\n    return 0.5\n")
    row = {"level": 3, "subject": "algebra"}
    assert score(f"{file}:reward", row) == 3
    assert score(f"{file}:plain", row) == 0.5


def test_it_may_import_its_neighbours_and_have_any_file_name(write):
    write("bonus = 0.25\n", "my_neighbour.py")
    file = write("from my_neighbour import bonus\ndef reward(prompt, response, answer):\n    return bonus\n", "json.py")
    assert score(f"{file}:reward", {}) == 0.25
    import json
    assert json.loads("1") == 1


@pytest.mark.parametrize("function, message", [
    ("", "path.py:function"), ("rewards.py", "path.py:function"), ("nowhere/rewards.py:reward", "there is no file")])
def test_a_bad_reference_is_explained(function, message):
    with pytest.raises(ValueError, match=message):
        load(function)


def test_a_missing_function_is_named_with_those_that_exist(write):
    file = write("def other(prompt, response, answer):\n    return 0\n")
    with pytest.raises(ValueError, match=r"no function reward \(it has: other\)"):
        load(f"{file}:reward")


@pytest.mark.parametrize("keyword", ["", "async "])
def test_sync_and_async_one_by_one_and_in_a_batch(write, keyword):
    file = write(f"{keyword}def one(prompt, response, answer, level):\n    return len(response) + level\n"
                 f"{keyword}def all(prompt, responses, answer):\n    return [len(one) for one in responses]\n")
    assert score(f"{file}:one", {"level": 3}) == 4
    samples = [Sample("p", "r" * n, "a", {"level": 3}) for n in (1, 2, 5)]
    assert grader(f"{file}:all", batch=True).grade_batch(samples) == [1, 2, 5]


@pytest.mark.parametrize("returned, words", [("[1.0]", "1 scores for 2 responses"), ("0.5", "must return a list")])
def test_a_batch_that_is_not_as_long_as_its_samples_is_an_error(write, returned, words):
    file = write(f"def reward(prompt, responses, answer):\n    return {returned}\n")
    with pytest.raises((TypeError, ValueError), match=words):
        grader(f"{file}:reward", batch=True).grade_batch([Sample("p", "r", "a")] * 2)


def test_two_files_of_the_same_name_are_two_modules(write, tmp_path):
    (tmp_path / "other").mkdir()
    files = [write(f"def reward(prompt, response, answer):\n    return {n}\n", name)
             for n, name in enumerate(["rewards.py", "other/rewards.py"])]
    graders = [grader(f"{file}:reward") for file in files]
    assert [one.grade(Sample("p", "r", "a")).score for one in graders] == [0, 1]
