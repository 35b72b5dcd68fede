"""Log-probabilities and entropy against torch's own, in one process; split vocabularies run in test_layouts."""
import pytest
import torch

from mrl.trainer import log_probs as module
from mrl.trainer.log_probs import VocabShard, log_probs_and_entropy, projected_log_probs_and_entropy


def naive(logits, targets, vocab, temperature):
    log_p = (logits[:, :vocab].float() / temperature).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def test_temperature_is_applied_before_the_softmax():
    logits = torch.tensor([[2.0, 1.0, 0.0]]).expand(3, 3)
    got, entropy = log_probs_and_entropy(logits, torch.tensor([0, 1, 2]), VocabShard(0, 3), 0.5)
    torch.testing.assert_close(got, torch.tensor([-0.1429, -2.1429, -4.1429]), atol=1e-4, rtol=0)
    # -Σ p log p with p = .8668, .1173, .0159
    torch.testing.assert_close(entropy, torch.full((3,), 0.4412), atol=1e-3, rtol=0)


def test_uniform_entropy_is_log_of_the_true_vocabulary():
    logits = torch.zeros(2, 8)
    logits[:, 5:] = 50.0  # padding columns that would dominate
    got, entropy = log_probs_and_entropy(logits, torch.tensor([0, 4]), VocabShard(0, 5))
    torch.testing.assert_close(got, torch.tensor([5.0, 5.0]).log().neg())
    torch.testing.assert_close(entropy, torch.tensor([5.0, 5.0]).log())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1 << 25, 24])
def test_values_and_gradients_equal_autograd(dtype, chunk, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk)  # 24 elements: 2 tokens of 12 columns at a time
    torch.manual_seed(0)
    logits = (3 * torch.randn(7, 12)).to(dtype)
    targets = torch.randint(0, 11, (7,))
    weight = torch.randn(2, 7)
    results = []
    for function in (lambda x: log_probs_and_entropy(x, targets, VocabShard(0, 11), 0.7),
                     lambda x: naive(x, targets, 11, 0.7)):
        x = logits.clone().requires_grad_()
        log_prob, entropy = function(x)
        (weight[0] @ log_prob + weight[1] @ entropy).backward()
        results.append((log_prob.detach(), entropy.detach(), x.grad))
    for got, expected in zip(*results):
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=1e-5)
    assert (results[0][2][:, 11] == 0).all()


@pytest.mark.parametrize("flat_buffer", [False, True])
@pytest.mark.parametrize(("chunk", "tokens"), [(2, 7), (7, 7), (100, 7), (3, 0)])
def test_logits_in_chunks_give_the_same(chunk, tokens, flat_buffer):
    torch.manual_seed(1)
    hidden, weight = torch.randn(tokens, 5), torch.randn(12, 5)
    targets, weights = torch.randint(0, 11, (tokens,)), torch.randn(2, tokens)

    def gradients(function):
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if flat_buffer:
            w.main_grad = torch.ones(12, 5)
        log_prob, entropy = function(x, w)
        (weights[0] @ log_prob + weights[1] @ entropy).backward()
        grad = w.grad + w.main_grad - 1 if flat_buffer else w.grad
        return log_prob.detach(), entropy.detach(), x.grad, grad

    expected = gradients(lambda x, w: log_probs_and_entropy(x @ w.T, targets, VocabShard(0, 11), 0.7))
    got = gradients(lambda x, w: projected_log_probs_and_entropy(x, w, targets, VocabShard(0, 11), chunk, 0.7))
    for one, other in zip(got, expected):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_no_more_logits_than_a_chunk_are_ever_there(monkeypatch):
    made = []
    add = module._Partial.add
    monkeypatch.setattr(module._Partial, "add", lambda self, where, logits, *rest: (
        made.append(len(logits)), add(self, where, logits, *rest)))
    hidden, weight = torch.randn(7, 5, requires_grad=True), torch.randn(12, 5, requires_grad=True)
    outputs = projected_log_probs_and_entropy(hidden, weight, torch.zeros(7, dtype=torch.int64), VocabShard(0, 11), 3)
    assert made == [3, 3, 1]
    kept = [tensor.shape for tensor in outputs[0].grad_fn.saved_tensors]
    assert max(shape.numel() for shape in kept) == weight.numel()


def test_large_logits_do_not_overflow():
    got, entropy = log_probs_and_entropy(torch.tensor([[1e4, 0.0], [-1e4, -1e4]]), torch.tensor([1, 0]),
                                         VocabShard(0, 2))
    torch.testing.assert_close(got, torch.tensor([-1e4, -0.6931472]))
    torch.testing.assert_close(entropy, torch.tensor([0.0, 0.6931472]))


def test_no_tokens():
    logits = torch.zeros(0, 4, requires_grad=True)
    got, entropy = log_probs_and_entropy(logits, torch.zeros(0, dtype=torch.int64), VocabShard(0, 4))
    (got.sum() + entropy.sum()).backward()
    assert got.shape == entropy.shape == (0,) and logits.grad.shape == (0, 4)


def test_zero_temperature_is_refused():
    with pytest.raises(ValueError, match="rollout.sampling.temperature > 0"):
        log_probs_and_entropy(torch.zeros(1, 2), torch.tensor([0]), VocabShard(0, 2), 0.0)
    with pytest.raises(ValueError, match="rollout.sampling.temperature > 0"):
        projected_log_probs_and_entropy(torch.zeros(1, 1), torch.zeros(2, 1), torch.tensor([0]), VocabShard(0, 2), 1,
                                        0.0)
