"""Rotary frequencies: equal to what transformers' own model computes, or refused."""
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mrl.reshard.spec import rope_problem
from mrl.trainer.rope import inverse_frequencies

SIZES = dict(hidden_size=48, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)


def config(head_dim=16, **rope) -> LlamaConfig:
    return LlamaConfig(**SIZES, head_dim=head_dim, rope_parameters=rope)


@pytest.mark.parametrize("rope", [
    dict(rope_type="default", rope_theta=1e6),
    dict(rope_type="linear", rope_theta=1e4, factor=4.0),
    dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
         original_max_position_embeddings=64),
    dict(rope_type="yarn", rope_theta=1e4, factor=2.0, attention_factor=1.0, original_max_position_embeddings=64),
])
def test_equal_to_transformers(rope):
    assert torch.equal(inverse_frequencies(config(**rope)), LlamaRotaryEmbedding(config(**rope)).inv_freq)


def test_head_dim_is_not_hidden_over_heads():
    # theta 100, head_dim 4: 100^(-0/4), 100^(-2/4)
    torch.testing.assert_close(inverse_frequencies(config(head_dim=4, rope_type="default", rope_theta=100.0)),
                               torch.tensor([1.0, 0.1]))


def test_llama3_divides_long_wavelengths_by_the_factor():
    frequencies = inverse_frequencies(config(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0,
                                             high_freq_factor=4.0, original_max_position_embeddings=64))
    plain = inverse_frequencies(config(rope_type="default", rope_theta=5e5))
    assert frequencies[0] == plain[0]  # wavelength 2π < 64 / 4
    assert frequencies[-1] == plain[-1] / 8


@pytest.mark.parametrize(("rope", "words"), [
    (dict(rope_type="dynamic", rope_theta=1e4, factor=2.0), "rope_type 'dynamic' is not supported"),
    (dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64),
     "'yarn' scales attention by 1.139"),  # 0.1 ln 4 + 1
])
def test_refused(rope, words):
    with pytest.raises(ValueError, match=words):
        inverse_frequencies(config(**rope))


@pytest.mark.parametrize("rope", [
    dict(factor=4.0), dict(factor=1.0), dict(factor=4.0, attention_factor=1.0), dict(factor=4.0, attention_factor=1.2),
    dict(factor=4.0, mscale=1.0, mscale_all_dim=1.0), dict(factor=4.0, mscale=1.0, mscale_all_dim=0.5),
    dict(factor=4.0, mscale=0.7),
], ids=str)
def test_attention_scaling_is_foreseen_as_transformers_computes_it(rope):
    yarn = dict(rope_type="yarn", rope_theta=1e4, original_max_position_embeddings=64, **rope)
    _, factor = ROPE_INIT_FUNCTIONS["yarn"](config(**yarn), torch.device("cpu"))
    assert (rope_problem(yarn) is None) == (factor == 1.0)
    assert factor == 1.0 or f"attention by {factor:.4g}," in rope_problem(yarn)
