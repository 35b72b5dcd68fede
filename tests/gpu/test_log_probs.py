"""The memory that log-probs and entropy take of a long microbatch and a large vocabulary, and that they are right."""
import pytest
import torch

from mrl.trainer.log_probs import VocabShard, log_probs_and_entropy, projected_log_probs_and_entropy

pytestmark = pytest.mark.gpu
TOKENS, VOCAB, HIDDEN, CHUNK = 16384, 151936, 1024, 1024
FULL_FP32 = 4 * TOKENS * VOCAB
"""Bytes of all logits in fp32."""
CHECKED = slice(0, TOKENS, 64)
"""Tokens that are compared with torch in fp32."""


@pytest.fixture
def inputs(gpus):
    """bfloat16 hidden states and output layer, and the targets."""
    gpus(1)
    generator = torch.Generator("cuda").manual_seed(0)
    hidden, weight = (torch.randn(size, HIDDEN, generator=generator, device="cuda").bfloat16() * scale
                      for size, scale in ((TOKENS, 1.0), (VOCAB, 0.05)))
    return hidden, weight, torch.randint(VOCAB, (TOKENS,), generator=generator, device="cuda")


def growth(compute) -> tuple[tuple[torch.Tensor, torch.Tensor], int]:
    """What a forward pass returns, and the most bytes that it and its backward pass held beyond what there was."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = compute()
    sum(output.sum() for output in outputs).backward()
    torch.cuda.synchronize()
    return tuple(output.detach() for output in outputs), torch.cuda.max_memory_allocated() - before


def assert_right(outputs: tuple[torch.Tensor, ...], logits: torch.Tensor, targets: torch.Tensor, atol: float) -> None:
    """Against torch in fp32, which has the logits of the CHECKED tokens."""
    log_p = logits.detach().float().log_softmax(-1)
    torch.testing.assert_close(outputs[0][CHECKED], log_p.gather(1, targets[CHECKED, None])[:, 0], atol=atol, rtol=0)
    torch.testing.assert_close(outputs[1][CHECKED], -(log_p.exp() * log_p).sum(-1), atol=atol, rtol=0)


def test_chunks_never_hold_most_of_the_logits(inputs):
    hidden, weight, targets = inputs
    for leaf in (hidden, weight):
        leaf.requires_grad_()
    outputs, bytes_more = growth(lambda: projected_log_probs_and_entropy(
        hidden, weight, targets, VocabShard(0, VOCAB), CHUNK))
    print(f"\nlogits in fp32 {FULL_FP32 / 2**30:.2f} GiB; in chunks of {CHUNK}: at most {bytes_more / 2**30:.2f} GiB")
    gradients = 2 * hidden.nbytes + 4 * weight.nbytes
    assert bytes_more < gradients + FULL_FP32 / 4 < FULL_FP32 / 2
    logits = hidden.detach()[CHECKED].float() @ weight.detach().float().T
    assert_right(outputs, logits, targets, atol=0.05)  # logits up to 8 were rounded to bfloat16


def test_whole_logits_have_no_copy_in_fp32(inputs):
    """Beside the model's own bfloat16 logits there is their gradient, and no more."""
    hidden, weight, targets = inputs
    logits = (hidden @ weight.T).requires_grad_()
    outputs, bytes_more = growth(lambda: log_probs_and_entropy(logits, targets, VocabShard(0, VOCAB)))
    print(f"\nbeside bfloat16 logits of {logits.nbytes / 2**30:.2f} GiB: at most {bytes_more / 2**30:.2f} GiB")
    assert bytes_more < logits.nbytes + FULL_FP32 / 4 < FULL_FP32
    assert_right(outputs, logits[CHECKED], targets, atol=1e-3)
