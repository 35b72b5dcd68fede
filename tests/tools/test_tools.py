"""The tools' own rules: which problems are held out, and what the quickstart's tokenizer makes of them."""
import json

import pytest

from tools.make_quickstart import HELD_OUT_PAIRS, make_problems, make_tokenizer
from tools.split_jsonl import split

LINES = [json.dumps({"prompt": f"p{i // 2}", "n": i}) for i in range(20)]  # every prompt twice


def numbers(lines: list[str]) -> list[int]:
    return [json.loads(line)["n"] for line in lines]


def test_split_keeps_equal_prompts_together_and_all_lines_in_order():
    train, heldout = split(LINES, 3, seed=1, key="prompt")
    assert len(heldout) == 6 and {n // 2 for n in numbers(train)}.isdisjoint(n // 2 for n in numbers(heldout))
    assert sorted(numbers(train) + numbers(heldout)) == list(range(20))
    assert numbers(train) == sorted(numbers(train)) and numbers(heldout) == sorted(numbers(heldout))


def test_split_depends_on_the_seed_alone():
    assert split(LINES, 3, seed=1, key="prompt") == split(LINES, 3, seed=1, key="prompt")
    assert len({tuple(split(LINES, 3, seed=seed, key="prompt")[1]) for seed in range(5)}) > 1
    assert set(split(LINES, 3, 1, "prompt")[1]) == set(split(LINES[::-1], 3, 1, "prompt")[1])


def test_split_compares_chat_messages_too():
    lines = [json.dumps({"chat": [{"role": "user", "content": str(i)}]}) for i in (0, 0, 1)]
    train, heldout = split(lines, 1, seed=1, key="chat")
    assert sorted([len(train), len(heldout)]) == [1, 2]


@pytest.mark.parametrize("heldout", [0, 10, 11])
def test_split_refuses_to_leave_a_side_empty(heldout):
    with pytest.raises(SystemExit, match="between 1 and 9"):
        split(LINES, heldout, seed=1, key="prompt")


def test_problems_are_all_additions_and_held_out_in_both_orders():
    train, heldout = make_problems(seed=1)
    assert (len(train), len(heldout)) == (10_000 - 2 * HELD_OUT_PAIRS, 2 * HELD_OUT_PAIRS)
    pairs = []
    for problem in train + heldout:
        a, b = problem["prompt"].removesuffix("=?").split("+")
        assert problem["answer"] == str(int(a) + int(b))
        pairs.append((int(a), int(b)))
    assert len(set(pairs)) == 10_000
    held_out = set(pairs[len(train):])
    assert {(b, a) for a, b in held_out} == held_out
    assert make_problems(seed=1) == (train, heldout) != make_problems(seed=2)


def test_tokenizer_has_one_token_a_character_and_the_chat_format():
    tokenizer = make_tokenizer()
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "12+34=?"}], add_generation_prompt=True,
                                        return_dict=False)
    # <|im_start|> "user" newline, the 7 characters, <|im_end|> newline, <|im_start|> "assistant" newline
    assert len(ids) == (1 + 4 + 1) + 7 + 2 + (1 + 9 + 1) and max(ids) < 64
    assert tokenizer.decode(tokenizer.encode("46") + [tokenizer.eos_token_id], skip_special_tokens=True) == "46"
    assert tokenizer.unk_token_id not in tokenizer.encode("0123456789+-*= abcz")
