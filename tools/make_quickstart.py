"""Makes what the quickstart needs: a tiny Qwen3 model with random weights, a character tokenizer, addition problems.

    python tools/make_quickstart.py --out DIR

DIR/init        Hugging Face model directory: ~0.8M parameters, 64-token vocabulary, chat template
DIR/train.jsonl two-digit additions {"prompt": "12+34=?", "answer": "46"}
DIR/heldout.jsonl 500 more; an operand pair held out is held out in both orders
"""
from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<|unk|>"]
CHARACTERS = "0123456789+-*=? \nabcdefghijklmnopqrstuvwxyzASU."
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
HELD_OUT_PAIRS = 250


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, and those of the chat format."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|im_end|>",
                                   unk_token="<|unk|>", chat_template=CHAT_TEMPLATE)


def make_model(out: Path, seed: int) -> None:
    """Write a random Qwen3 of the quickstart's size to `out`."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=64, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, tie_word_embeddings=True, rope_theta=10000.0,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id))
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def make_problems(seed: int) -> tuple[list[dict], list[dict]]:
    """All 10,000 two-digit additions, in random order, as (train, held out)."""
    shuffle = random.Random(seed)
    pairs = [(a, b) for a in range(100) for b in range(a + 1, 100)]
    held_out = set(shuffle.sample(pairs, HELD_OUT_PAIRS))
    rows = [(a, b) for a in range(100) for b in range(100)]
    shuffle.shuffle(rows)
    train, test = [], []
    for a, b in rows:
        problem = {"prompt": f"{a}+{b}=?", "answer": str(a + b)}
        (test if (min(a, b), max(a, b)) in held_out else train).append(problem)
    return train, test


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    make_model(arguments.out / "init", arguments.seed)
    for name, rows in zip(("train", "heldout"), make_problems(arguments.seed)):
        with open(arguments.out / f"{name}.jsonl", "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        print(f"{arguments.out}/{name}.jsonl: {len(rows)} problems")


if __name__ == "__main__":
    main()
