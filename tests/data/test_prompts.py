"""Reading prompt files, and what is said about broken ones."""
import sys

import pyarrow
import pyarrow.parquet
import pytest

from mrl.config.schema import Data
from mrl.data.prompts import DataError, load_prompts


def data(**keys):
    return Data(train="unused", **keys)


@pytest.fixture
def write(tmp_path):
    def write(content, name="rows.jsonl"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


GOOD = '{"prompt": "1+1?", "answer": "2", "level": 1}\n{"prompt": "2+2?", "answer": 4, "level": 2}\n'


def test_jsonl_rows_keep_order_and_columns(write):
    rows = load_prompts(write(GOOD), data())
    assert rows == [{"prompt": "1+1?", "answer": "2", "level": 1}, {"prompt": "2+2?", "answer": 4, "level": 2}]


def test_blank_lines_and_a_byte_order_mark_are_harmless(write):
    assert load_prompts(write(b"\xef\xbb\xbf" + GOOD.replace("\n", "\n\n").encode()), data()) == \
        load_prompts(write(GOOD, "plain.jsonl"), data())


def test_other_columns_and_chat_messages(write):
    chat = [{"role": "user", "content": "hi"}]
    path = write('{"chat": [{"role": "user", "content": "hi"}], "gold": 1}')
    assert load_prompts(path, data(prompt_key="chat", answer_key="gold")) == [{"chat": chat, "gold": 1}]


def test_parquet_equals_jsonl(write, tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "hi"}], "answer": "1"},
            {"prompt": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "ho"}], "answer": "2"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert load_prompts(str(tmp_path / "rows.parquet"), data()) == rows


@pytest.mark.parametrize("content, words", [
    (GOOD + '{"prompt": "3+3?", "answer"\n', r"rows\.jsonl, line 3 is not valid JSON"),
    (GOOD + "\n\n[1, 2]\n", r"line 5 holds a list"),
    (GOOD.encode() + b'{"prompt": "\xff", "answer": "1"}\n', r"line 3 is not UTF-8"),
    (GOOD + '{"question": "3?", "answer": "6"}',
     r"line 3: column 'prompt' \(prompt_key\) is missing.*question, answer"),
    (GOOD + '{"prompt": "3?", "gold": "6"}', r"line 3: column 'answer' \(answer_key\) is missing.*prompt, gold"),
    (GOOD + '{"prompt": "3?", "answer": null}', r"line 3: column 'answer' \(answer_key\) is empty"),
    (GOOD + '{"prompt": " ", "answer": "6"}', r"line 3: the prompt .* is blank"),
    (GOOD + '{"prompt": 3, "answer": "6"}', r"line 3: the prompt .* a string or a list of messages"),
    (GOOD + '{"prompt": [], "answer": "6"}', r"line 3: the prompt .* a string or a list of messages"),
    (GOOD + '{"prompt": [{"role": "user"}], "answer": "6"}', r"line 3: the prompt .* a string or a list of messages"),
    ("", r"rows\.jsonl has no rows"),
    ("\n\n", r"rows\.jsonl has no rows"),
])
def test_a_broken_file_is_an_error_that_names_the_place(write, content, words):
    with pytest.raises(DataError, match=words):
        load_prompts(write(content), data())


def test_a_parquet_row_with_an_empty_answer_is_named(tmp_path):
    table = pyarrow.Table.from_pylist([{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": None}])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="row 1: column 'answer'"):
        load_prompts(str(tmp_path / "rows.parquet"), data())


def test_a_file_that_is_no_parquet(write):
    with pytest.raises(DataError, match="not a readable Parquet file"):
        load_prompts(write("no parquet at all", "rows.parquet"), data())


def test_a_missing_file_and_an_unknown_ending(write, tmp_path):
    with pytest.raises(DataError, match="absent.jsonl does not exist.*correct the path"):
        load_prompts(str(tmp_path / "absent.jsonl"), data())
    with pytest.raises(DataError, match=r"unknown ending '\.csv'.*\.jsonl, \.parquet, hf:"):
        load_prompts(write("a,b", "rows.csv"), data())


def test_the_hub_needs_its_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="pip install datasets"):
        load_prompts("hf:some/name:train", data())


@pytest.mark.parametrize("source, name, split", [
    ("hf:some/name:test", "some/name", "test"), ("hf:some/name", "some/name", "train")])
def test_hub_name_and_split(monkeypatch, source, name, split):
    class Datasets:
        @staticmethod
        def load_dataset(got_name, split):
            return [{"prompt": got_name, "answer": split}]

    monkeypatch.setitem(sys.modules, "datasets", Datasets)
    assert load_prompts(source, data()) == [{"prompt": name, "answer": split}]
