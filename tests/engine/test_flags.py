"""The server arguments that belong to mrl are found in every spelling that the engines' parsers take."""
import pytest

from mrl.engine.flags import OWNED_FLAGS, owned_flag


@pytest.mark.parametrize("engine, argument, flag", [
    *[(engine, argument, flag) for engine in OWNED_FLAGS for argument, flag in [
        ("--dtype", "--dtype"), ("--dtype=half", "--dtype"), ("--load_format", "--load-format"),
        ("--tensor-par", "--tensor-parallel-size")]],
    ("vllm", "-tp", "-tp"), ("vllm", "-tp=2", "-tp"), ("vllm", "--logprobs_mode=raw_logits", "--logprobs-mode"),
    ("vllm", "--enable-eplb", "--enable-eplb"), ("sglang", "--init_expert_location=x", "--init-expert-location"),
    ("vllm", "--no_enable_expert_parallel", "--no-enable-expert-parallel"), ("sglang", "--ep=2", "--ep"),
    ("sglang", "--attn_dp_size", "--attn-dp-size"), ("sglang", "--tp=2", "--tp"), ("sglang", "--mod", "--model"),
    ("sglang", "--sampling_backend", "--sampling-backend"),
])
def test_owned(engine, argument, flag):
    assert owned_flag(engine, argument) == flag and OWNED_FLAGS[engine][flag]


@pytest.mark.parametrize("engine, free", [
    ("vllm", ["--max-num-seqs", "64", "--gpu-memory-utilization=0.8", "--no-enable-prefix-caching", "--", "-1", "model",
              "--compilation-config.level", "3", "--tokenizer-mode", "auto", "--block-size", "16"]),
    ("sglang", ["--max-running-requests", "64", "--mem-fraction-static=0.8", "--disable-radix-cache", "--", "-1",
                "--attention-backend", "fa3", "--disable-cuda-graph", "--chunked-prefill-size", "2048"]),
])
def test_others_are_free(engine, free):
    assert [argument for argument in free if owned_flag(engine, argument)] == []
