"""Prompts to tokens, with a character tokenizer whose ids can be written down by hand."""
import json
import string

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

from mrl.config.schema import Data
from mrl.data.prompts import DataError
from mrl.data.tokenize import PromptEncoder, PromptTooLong, UnknownToken

SPECIAL = ["<pad>", "<start>", "<end>"]
CHARACTERS = string.ascii_letters + string.digits + " \n+=?."
VOCABULARY = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
TEMPLATE = ("{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
            "{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
            "<start>{{ m.role }}\n{{ m.content }}<end>\n{% endfor %}"
            "{% if add_generation_prompt %}<start>assistant\n{% endif %}")


def ids(*parts):
    return [VOCABULARY[token] for part in parts for token in ([part] if part in SPECIAL else part)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_model(path)
    return str(path)


def save_model(path, template=TEMPLATE, vocab_size=80, eos="<end>"):
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token=eos, unk_token="?")
    fast.chat_template = template
    fast.save_pretrained(path)
    Qwen3Config(vocab_size=vocab_size, eos_token_id=VOCABULARY[eos] if eos else None).save_pretrained(path)


def encoder(model, chat_template=None, **keys):
    return PromptEncoder(model, Data(train="unused", **keys), chat_template)


def test_a_string_prompt_by_hand(model):
    expected = ids("<start>", "user\n1+1=?", "<end>", "\n", "<start>", "assistant\n")
    assert encoder(model).encode({"prompt": "1+1=?"}) == expected


def test_system_prompt_and_suffix_go_round_a_string_prompt(model):
    expected = ids("<start>", "system\nAdd.", "<end>", "\n", "<start>", "user\n1+1=? Go", "<end>", "\n",
                   "<start>", "assistant\n")
    assert encoder(model, system_prompt="Add.", prompt_suffix=" Go").encode({"prompt": "1+1=?"}) == expected


def test_a_list_of_messages_is_left_as_it_is(model):
    messages = [{"role": role, "content": text} for role, text in [("user", "a"), ("assistant", "b"), ("user", "c")]]
    expected = ids("<start>", "user\na", "<end>", "\n", "<start>", "assistant\nb", "<end>", "\n",
                   "<start>", "user\nc", "<end>", "\n", "<start>", "assistant\n")
    assert encoder(model, system_prompt="Add.", prompt_suffix="!").encode({"prompt": messages}) == expected


def test_another_chat_template(model, tmp_path):
    (tmp_path / "plain.jinja").write_text("{{ messages[0].content }} =")
    assert encoder(model, str(tmp_path / "plain.jinja")).encode({"prompt": "1+1"}) == ids("1+1 =")


def test_decode_leaves_special_tokens_out_and_changes_nothing_else(model):
    assert encoder(model).decode(ids("4 2 .", "<end>")) == "4 2 ."


def test_ids_beyond_the_model_are_an_error(model):
    with pytest.raises(UnknownToken, match=r"\[80\].*ids 0 to 79"):
        encoder(model).decode([5, 80])


def test_an_unused_embedding_row_that_was_sampled_shows_in_the_text(model):
    """71 ids, 80 rows: dropping id 75 would read "42"."""
    assert encoder(model).decode(ids("4") + [75, 79] + ids("2")) == "4\ufffd\ufffd2"


def test_plain_text_and_the_end_of_a_turn(model):
    assert encoder(model).encode_text("4 2") == ids("4 2")
    assert encoder(model).eos_id == VOCABULARY["<end>"]


def test_stop_ids_come_from_tokenizer_config_and_generation_config(tmp_path):
    save_model(tmp_path)
    assert encoder(str(tmp_path)).stop_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    assert encoder(str(tmp_path)).stop_ids == (0, 2)


def test_overlong_prompts_are_an_error_naming_row_length_and_limit(model):
    rows = [{"prompt": "1"}, {"prompt": "1+1=?"}]
    with pytest.raises(PromptTooLong, match="row 1: the prompt has 24 tokens, data.max_prompt_tokens is 20"):
        encoder(model, max_prompt_tokens=20).encode_all(rows)


def test_overlong_prompts_can_be_dropped_but_not_all(model):
    rows = [{"prompt": "1+1=?", "answer": 2}, {"prompt": "1", "answer": 1}]
    kept, encoded = encoder(model, max_prompt_tokens=20, overlong_prompt="drop").encode_all(rows)
    assert kept == [rows[1]] and [len(prompt) for prompt in encoded] == [20]
    with pytest.raises(DataError, match="all 2 prompts are longer"):
        encoder(model, max_prompt_tokens=5, overlong_prompt="drop").encode_all(rows)


def test_a_prompt_the_template_refuses_is_named(model):
    with pytest.raises(DataError, match="row 0: .*unknown role robot"):
        encoder(model).encode_all([{"prompt": [{"role": "robot", "content": "a"}]}])


def test_unusable_model_directories_are_explained(tmp_path, model):
    with pytest.raises(DataError, match="has no usable tokenizer"):
        encoder(str(tmp_path))
    for name, keys, words in [("template", {"template": None}, "no chat template: set model.chat_template"),
                              ("size", {"vocab_size": 64}, "64 embedding rows"),
                              ("stop", {"eos": None}, "end-of-sequence")]:
        save_model(tmp_path / name, **keys)
        with pytest.raises(DataError, match=words):
            encoder(str(tmp_path / name))
    with pytest.raises(DataError, match="chat_template .* does not exist"):
        encoder(model, str(tmp_path / "absent.jinja"))
