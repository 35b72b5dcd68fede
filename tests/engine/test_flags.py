"""The server arguments that belong to mrl are found in every spelling that vLLM's parser takes."""
import pytest

from mrl.engine.flags import OWNED_FLAGS, owned_flag


@pytest.mark.parametrize("argument, flag", [
    ("--dtype", "--dtype"), ("--dtype=half", "--dtype"), ("--load_format", "--load-format"), ("-tp", "-tp"),
    ("-tp=2", "-tp"), ("--tensor-par", "--tensor-parallel-size"), ("--logprobs_mode=raw_logits", "--logprobs-mode"),
])
def test_owned(argument, flag):
    assert owned_flag(argument) == flag and OWNED_FLAGS[flag]


def test_others_are_free():
    free = ["--max-num-seqs", "64", "--gpu-memory-utilization=0.8", "--no-enable-prefix-caching", "--", "-1", "model",
            "--compilation-config.level", "3", "--tokenizer-mode", "auto", "--block-size", "16"]
    assert [argument for argument in free if owned_flag(argument)] == []
