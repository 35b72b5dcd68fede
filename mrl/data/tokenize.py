"""Prompts to token ids, once; generated ids back to text, for rewards and logs only, never to train on."""
from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from mrl.config import schema
from mrl.data.prompts import DataError, Row


class PromptTooLong(DataError):
    """A prompt exceeds `data.max_prompt_tokens`."""


class UnknownToken(ValueError):
    """A token id that the model cannot have produced: the tokens belong to another model."""


_NO_TEXT = "\ufffd"


class PromptEncoder:
    """A model's tokenizer and chat template.

    Args:
        model_path: Hugging Face model directory or hub id.
        data: how a row becomes messages, and how long a prompt may be.
        chat_template: path of a Jinja file that replaces the tokenizer's own template.

    Raises:
        DataError: no tokenizer, no chat template, or a tokenizer with more ids than the model has embedding rows.
    """

    def __init__(self, model_path: str, data: schema.Data, chat_template: str | None = None):
        self._data = data
        self._tokenizer = _load_tokenizer(model_path, "model.path")
        if chat_template is not None:
            if not Path(chat_template).is_file():
                raise DataError(f"model.chat_template {chat_template} does not exist: give the path of a Jinja file")
            self._tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        if not self._tokenizer.chat_template:
            raise DataError(f"the tokenizer of {model_path} has no chat template: set model.chat_template")
        config = AutoConfig.from_pretrained(model_path).get_text_config()
        self._known_ids = max(self._tokenizer.get_vocab().values()) + 1
        self._embedding_rows = config.vocab_size
        if self._known_ids > self._embedding_rows:
            raise DataError(f"the tokenizer of {model_path} has ids up to {self._known_ids - 1}, but the model only "
                            f"{self._embedding_rows} embedding rows: they do not belong together")
        self._stop_ids = self._find_stop_ids(model_path, getattr(config, "eos_token_id", None))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a response: those of the tokenizer, the model's config and its generation config, sorted."""
        return self._stop_ids

    @property
    def eos_id(self) -> int:
        """The id that ends an assistant turn: the tokenizer's end-of-sequence token, else the first stop id."""
        return self._stop_ids[0] if self._tokenizer.eos_token_id is None else self._tokenizer.eos_token_id

    def require_same_tokens(self, model_path: str, key: str) -> None:
        """DataError unless the model at `model_path`, which `key` names, gives every token the same id.

        How many further rows its embedding has does not matter.
        """
        mine, other = self._tokenizer.get_vocab(), _load_tokenizer(model_path, key).get_vocab()
        differing = [token for token in sorted({*mine, *other}) if mine.get(token) != other.get(token)]
        if differing:
            raise DataError(
                f"{key} {model_path} has another tokenizer than the model: {len(differing)} tokens have other "
                f"ids, for example {differing[0]!r} ({mine.get(differing[0])} and {other.get(differing[0])}). It "
                "is given the ids that the model samples: take one with the model's tokenizer")
        rows = AutoConfig.from_pretrained(model_path).get_text_config().vocab_size
        if rows < self._known_ids:
            raise DataError(f"{key} {model_path} has {rows} embedding rows, fewer than its tokenizer has ids "
                            f"({self._known_ids}): they do not belong together")

    def messages(self, row: Row) -> list[dict[str, Any]]:
        """The chat a row stands for. A string prompt gets `system_prompt` and `prompt_suffix`, a list is left as is."""
        prompt = row[self._data.prompt_key]
        if not isinstance(prompt, str):
            return list(prompt)
        system = [] if self._data.system_prompt is None else [{"role": "system", "content": self._data.system_prompt}]
        return [*system, {"role": "user", "content": prompt + self._data.prompt_suffix}]

    def encode(self, row: Row) -> list[int]:
        """Token ids of a row's chat up to where the model's answer begins.

        Raises:
            DataError: longer than `data.max_prompt_tokens`, or the template refuses the messages.
        """
        try:
            # The template writes the special tokens itself; add_special_tokens would double them.
            text = self._tokenizer.apply_chat_template(self.messages(row), add_generation_prompt=True, tokenize=False)
        except Exception as error:
            prompt = row[self._data.prompt_key]
            raise DataError(f"the chat template refuses the prompt {prompt!r:.200}: {error}") from error
        ids = self.encode_text(text)
        if len(ids) > self._data.max_prompt_tokens:
            raise PromptTooLong(f"the prompt has {len(ids)} tokens, data.max_prompt_tokens is "
                                f"{self._data.max_prompt_tokens}: raise it, or set data.overlong_prompt to drop")
        return ids

    def encode_all(self, rows: Sequence[Row]) -> tuple[list[Row], list[list[int]]]:
        """Rows and their token ids, without the overlong ones if `data.overlong_prompt` is drop.

        Raises:
            DataError: naming the 0-based row that cannot be encoded; or no row is left.
        """
        kept, encoded = [], []
        for number, row in enumerate(rows):
            try:
                ids = self.encode(row)
            except PromptTooLong as error:
                if self._data.overlong_prompt == "drop":
                    continue
                raise PromptTooLong(f"row {number}: {error}") from error
            except DataError as error:
                raise DataError(f"row {number}: {error}") from error
            kept.append(row)
            encoded.append(ids)
        if not kept:
            raise DataError(f"all {len(rows)} prompts are longer than data.max_prompt_tokens "
                            f"({self._data.max_prompt_tokens}) and were dropped: raise it")
        return kept, encoded

    def encode_text(self, text: str) -> list[int]:
        """Token ids of plain text, nothing added. For targets of supervised training."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of generated ids, special tokens left out.

        A model whose embedding has more rows than the tokenizer has ids can sample such an unused id. It stands as
        U+FFFD in the text: leaving it out could turn a wrong answer into a right one.

        Raises:
            UnknownToken: an id beyond the model's embedding.
        """
        beyond = sorted({token for token in ids if not 0 <= token < self._embedding_rows})
        if beyond:
            raise UnknownToken(f"token ids {beyond[:10]} are beyond the model, which has ids 0 to "
                               f"{self._embedding_rows - 1}: these tokens come from another model")
        runs = itertools.groupby(ids, key=lambda token: token < self._known_ids)
        return "".join(self._decode_known(list(run)) if known else _NO_TEXT * len(list(run)) for known, run in runs)

    def _decode_known(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _find_stop_ids(self, model_path: str, configured: int | list[int] | None) -> tuple[int, ...]:
        try:
            declared = GenerationConfig.from_pretrained(model_path).eos_token_id
        except OSError:
            declared = None     # a model need not have a generation config
        found: set[int | None] = set()
        for candidate in (self._tokenizer.eos_token_id, configured, declared):
            found.update(candidate if isinstance(candidate, (list, tuple)) else [candidate])
        stop_ids = tuple(sorted(found - {None}))
        if not stop_ids:
            raise DataError(f"neither tokenizer nor configuration of {model_path} names an end-of-sequence token: "
                            "set eos_token_id in its config.json")
        return stop_ids


def _load_tokenizer(model_path: str, key: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(model_path)
    except (OSError, ValueError) as error:
        raise DataError(f"{key} {model_path} has no usable tokenizer: {error}") from error
