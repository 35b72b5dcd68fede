"""Reads prompt files into rows and refuses broken ones, naming the place."""
from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mrl.config import schema
from mrl.data import reasoning_gym

Row = dict[str, Any]


class DataError(ValueError):
    """A data file or a row in it cannot be used; the message names file and row."""


def load_prompts(source: str, data: schema.Data, subset_key: str | None = None) -> list[Row]:
    """All rows of a prompt source, each checked to hold a prompt and an answer.

    Args:
        source: a .jsonl or .parquet file, 'hf:name[:split]' (split `train` unless given) for the Hugging Face
            `datasets` library, or 'reasoning_gym:task[:option=value,...]' for the reasoning-gym package.
        data: tells the names of the prompt and answer columns.
        subset_key: one more column that every row must have.

    Returns:
        one dict a row, in the order of the source, with all its columns.

    Raises:
        DataError: no such file, unknown format, malformed row (with its line number), no rows, or a row whose
            prompt or answer is missing or of no usable type.
    """
    rows = []
    for place, row in _read(source, data):
        _check_row(row, place, data, subset_key)
        rows.append(row)
    if not rows:
        raise DataError(f"{source} has no rows: give a data set with at least one prompt")
    return rows


def _read(source: str, data: schema.Data) -> Iterator[tuple[str, Any]]:
    """(where it stands, row) of every row."""
    if source.startswith("hf:"):
        yield from _read_hub(source)
        return
    if source.startswith(reasoning_gym.PREFIX):
        yield from _make_up(source, data)
        return
    path = Path(source)
    if not path.is_file():
        raise DataError(f"data file {source} does not exist (looked for {path.resolve()}): "
                        "correct the path; a Hugging Face data set is written hf:name, a task of reasoning-gym "
                        "reasoning_gym:task")
    if path.suffix == ".jsonl":
        yield from _read_jsonl(path)
    elif path.suffix == ".parquet":
        yield from _read_parquet(path)
    else:
        raise DataError(f"data file {source} has the unknown ending {path.suffix!r}: "
                        "use .jsonl, .parquet, hf:name[:split] or reasoning_gym:task")


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            place = f"{path}, line {number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield place, json.loads(text)
            except UnicodeDecodeError as error:
                raise DataError(f"{place} is not UTF-8 text: {error}") from error
            except json.JSONDecodeError as error:
                raise DataError(f"{place} is not valid JSON: {error.msg} at column {error.colno}") from error


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    yield f"{path}, row {number}", row
                    number += 1
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}") from error


def _read_hub(source: str) -> Iterator[tuple[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{source} needs the Hugging Face `datasets` library: pip install datasets, "
                        "or give a .jsonl or .parquet file") from error
    name, _, split = source.removeprefix("hf:").partition(":")
    try:
        rows = datasets.load_dataset(name, split=split or "train")
    except Exception as error:
        raise DataError(f"{source} cannot be loaded: {error}") from error
    for number, row in enumerate(rows):
        yield f"{source}, row {number}", row


def _make_up(source: str, data: schema.Data) -> Iterator[tuple[str, Any]]:
    try:
        for number, row in enumerate(reasoning_gym.make_rows(source, data.prompt_key, data.answer_key)):
            yield f"{source}, row {number}", row
    except (ImportError, ValueError) as error:
        raise DataError(f"{source} cannot be made: {error}") from error


def _check_row(row: Any, place: str, data: schema.Data, subset_key: str | None) -> None:
    if not isinstance(row, dict):
        raise DataError(f"{place} holds a {type(row).__name__}, not an object with columns")
    for key, setting in ((data.prompt_key, "prompt_key"), (data.answer_key, "answer_key"), (subset_key, "subset_key")):
        if key is not None and row.get(key) is None:
            state = "empty" if key in row else "missing"
            raise DataError(f"{place}: column {key!r} ({setting}) is {state}; the row has: {', '.join(map(str, row))}")
    prompt = row[data.prompt_key]
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError(f"{place}: the prompt in column {data.prompt_key!r} is blank")
    elif not (isinstance(prompt, list) and prompt and all(_is_message(message) for message in prompt)):
        raise DataError(f"{place}: the prompt in column {data.prompt_key!r} must be a string or a list of messages "
                        f"{{role, content}}, not {prompt!r:.200}")


def _is_message(message: Any) -> bool:
    return (isinstance(message, dict) and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), (str, list)))
