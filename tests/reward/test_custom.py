"""Loading a user's reward function."""
import sys

import pytest

from mrl.reward.custom import load


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
    assert load(f"{file}:reward")("p", "r", "a", row) == ["p", "r", "a", {"level": 3, "subject": "algebra"}]


def test_it_may_name_only_the_columns_it_wants(write):
    file = write("def reward(prompt, response, answer, level):\n    return level\n"
                 "def plain(prompt, response, answer):\n    return 0.5\n")
    row = {"level": 3, "subject": "algebra"}
    assert load(f"{file}:reward")("p", "r", "a", row) == 3
    assert load(f"{file}:plain")("p", "r", "a", row) == 0.5


def test_it_may_import_its_neighbours_and_have_any_file_name(write):
    write("bonus = 0.25\n", "my_neighbour.py")
    file = write("from my_neighbour import bonus\ndef reward(prompt, response, answer):\n    return bonus\n", "json.py")
    assert load(f"{file}:reward")("p", "r", "a", {}) == 0.25
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
