"""On-policy distillation: advantages from log-probs, and what their gradient is in expectation."""
import math

import pytest
import torch

from mrl.algorithm.advantages import Scored, estimate
from mrl.algorithm.loss import make_loss
from mrl.config.algorithm import Algorithm

DISTILL = Algorithm(name="distill")


def test_a_token_is_as_good_as_the_teacher_finds_it_likelier_than_the_student():
    student, teacher = torch.tensor([9.0, 0.5, 0.25]).log(), torch.tensor([1.0, 0.25, 0.5]).log()
    mask = torch.tensor([False, True, True])
    # The reward counts for nothing, nor do the other samples of the group.
    one, other = estimate(DISTILL, [Scored(0, 7.0, mask, divergence=student - teacher),
                                    Scored(0, 0.0, mask, divergence=torch.tensor([math.nan, 0.0, 0.0]))])
    assert one.advantage.tolist() == pytest.approx([0, -math.log(2), math.log(2)]) and one.returns is None
    assert other.advantage.tolist() == [0, 0, 0]


def test_without_a_teacher_or_with_a_broken_one_it_says_so():
    with pytest.raises(ValueError, match="sequence 0 has no divergence, which algorithm.name distill needs from a tea"):
        estimate(DISTILL, [Scored(0, 0.0, torch.tensor([True]))])
    with pytest.raises(ValueError, match=r"sequence 0: divergence\[0\] is inf"):
        estimate(DISTILL, [Scored(0, 0.0, torch.tensor([True]), divergence=torch.tensor([math.inf]))])


def test_the_expected_gradient_is_that_of_the_reverse_kl():
    """Over all tokens a student could have sampled, each as often as it is likely, against autograd through
    KL(student || teacher) = Σ p log(p / q)."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(7, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0)
    log_p = logits.log_softmax(0)
    expected, = torch.autograd.grad((log_p.exp() * (log_p - teacher)).sum(), logits, retain_graph=True)

    mask, student = torch.ones(7, dtype=torch.bool), log_p.detach()
    advantage = estimate(DISTILL, [Scored(0, 0.0, mask, divergence=student - teacher)])[0].advantage
    loss, _ = make_loss(DISTILL, 0.0)(log_p, torch.zeros(7), {
        "loss_mask": mask, "token_weight": student.exp(), "mean_weight": student.exp(), "advantage": advantage,
        "rollout_log_prob": student, "sequence": torch.arange(7)})
    got, = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(got, expected, atol=1e-7, rtol=1e-6)
