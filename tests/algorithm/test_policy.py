"""The policy term against values worked out by hand, and its gradient at the bounds."""
import math

import pytest
import torch

from mrl.algorithm.policy import clipped_ratio, policy_term, sequence_log_ratio
from mrl.config.algorithm import Algorithm, Clip


def term(ratios, advantages, sequence=None, mask=None, old=-1.0, **algorithm):
    """The term at these ratios to proximal log-probs of `old`, and the gradient of its sum."""
    log_probs = (torch.tensor(ratios).log() + old).requires_grad_()
    mask = torch.ones(len(ratios), dtype=torch.bool) if mask is None else torch.tensor(mask)
    sequence = torch.arange(len(ratios)) if sequence is None else torch.tensor(sequence)
    got = policy_term(Algorithm(**algorithm), torch.where(mask, log_probs, 0.0), torch.where(mask, old, 0.0),
                      torch.tensor(advantages), mask, sequence)
    torch.where(mask, got.loss, 0.0).sum().backward()
    assert not got.ratio.requires_grad
    return got.loss.tolist(), got.ratio.tolist(), got.clipped.tolist(), log_probs.grad.tolist()


@pytest.mark.parametrize("ratio, advantage, loss, is_clipped", [
    (1.0, 1.0, -1.0, False),
    (1.1, 1.0, -1.1, False),
    (1.5, 1.0, -1.2, True),      # the gain is bounded
    (0.5, 1.0, -0.5, False),     # a fallen good token is pulled back up
    (1.5, -1.0, 1.5, False),     # a risen bad token is pushed back down
    (0.5, -1.0, 0.8, True),
    (1.5, 0.0, 0.0, False),
])
def test_clipped_ratio(ratio, advantage, loss, is_clipped):
    [value], [got_ratio], [clipped], [slope] = term([ratio], [advantage])
    assert value == pytest.approx(loss, abs=1e-6) and got_ratio == pytest.approx(ratio, abs=1e-6)
    assert clipped is is_clipped
    assert slope == pytest.approx(0.0 if is_clipped else -ratio * advantage, abs=1e-6)


def test_the_bounds_may_differ():
    loss = term([1.5, 0.5], [1.0, -1.0], clip={"low": 0.2, "high": 0.28})[0]
    assert loss == pytest.approx([-1.28, 0.8])


def test_dual_clip_bounds_the_loss_of_a_bad_token_that_has_risen():
    loss, _, clipped, slope = term([4.0, 2.9, 4.0, 0.5], [-2.0, -2.0, 2.0, -2.0], clip={"dual": 3.0})
    assert loss == pytest.approx([6.0, 5.8, -2.4, 1.6])
    assert clipped == [True, False, True, True]
    assert slope == pytest.approx([0.0, 5.8, 0.0, 0.0], rel=1e-5)


def test_gspo_takes_one_ratio_a_sequence():
    # Ratios 2 and 0.5 make a sequence of ratio 1; 1.21 and 1 one of 1.1; a tool token in between counts for nothing.
    loss, ratio, clipped, slope = term([2.0, 0.5, 1.21, 50.0, 1.0], [1.0, 1.0, -1.0, 0.0, -1.0], [4, 4, 0, 0, 0],
                                       [True, True, True, False, True], policy_loss="gspo", clip={"high": 0.05})
    assert [ratio[i] for i in (0, 1, 2, 4)] == pytest.approx([1.0, 1.0, 1.1, 1.1])
    assert [loss[i] for i in (0, 1, 2, 4)] == pytest.approx([-1.0, -1.0, 1.1, 1.1])
    assert slope == pytest.approx([-1.0, -1.0, 1.1, 0.0, 1.1]) and not any(clipped)
    risen = term([1.21, 1.0], [1.0, 1.0], [1, 1], policy_loss="gspo", clip={"high": 0.05})
    assert risen[0] == pytest.approx([-1.05, -1.05]) and risen[2] == [True, True] and risen[3] == [0.0, 0.0]


def test_gspo_token_has_the_gradient_of_the_papers_sequence_ratio():
    """With equal advantages inside a sequence: min(s A, clip(s) A) of s = exp(mean log-ratio), by autograd."""
    torch.manual_seed(0)
    log_ratio = (torch.randn(7, dtype=torch.float64) * 0.2).requires_grad_()
    sequence, advantage = torch.tensor([0, 0, 0, 1, 1, 1, 1]), torch.tensor([1.5, -0.5], dtype=torch.float64)
    ours = clipped_ratio(sequence_log_ratio(log_ratio, torch.ones(7, dtype=torch.bool), sequence), advantage[sequence],
                         Clip(low=0.5, high=0.5))
    (ours.loss / torch.tensor([3.0] * 3 + [4.0] * 4)).sum().backward()
    mine, log_ratio.grad = log_ratio.grad, None
    means = torch.stack([log_ratio[:3].mean(), log_ratio[3:].mean()]).exp()
    paper = -torch.minimum(means * advantage, means.clamp(0.5, 1.5) * advantage)
    paper.sum().backward()
    torch.testing.assert_close(mine, log_ratio.grad)
    torch.testing.assert_close(ours.loss[[0, 3]].detach(), paper.detach())


def test_cispo_weighs_the_gradient_of_log_p_and_never_drops_it():
    loss, ratio, clipped, slope = term([1.1, 5.0, 0.1], [1.0, 1.0, -1.0], policy_loss="cispo",
                                       clip={"low": 1.0, "high": 2.0})
    assert slope == pytest.approx([-1.1, -3.0, 0.1]) and clipped == [False, True, False]
    log_probs = [math.log(r) - 1 for r in (1.1, 5.0, 0.1)]
    assert loss == pytest.approx([-1.1 * log_probs[0], -3.0 * log_probs[1], 0.1 * log_probs[2]], rel=1e-5)
    assert ratio == pytest.approx([1.1, 5.0, 0.1])


def test_reinforce_has_no_ratio():
    loss, ratio, clipped, slope = term([1.0, 5.0], [2.0, -1.0], policy_loss="reinforce")
    assert loss == pytest.approx([2.0, math.log(5.0) - 1]) and slope == [-2.0, 1.0] and clipped == [False, False]


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo", "reinforce"])
def test_a_ratio_that_would_overflow_stays_finite(kind):
    log_prob = torch.tensor([0.0, 0.0], requires_grad=True)
    got = policy_term(Algorithm(policy_loss=kind), log_prob, torch.tensor([-500.0, -500.0]), torch.tensor([0.0, -1.0]),
                      torch.ones(2, dtype=torch.bool), torch.tensor([0, 1]))
    got.loss.sum().backward()
    assert torch.isfinite(got.loss).all() and torch.isfinite(log_prob.grad).all() and torch.isfinite(got.ratio).all()
    assert got.loss[0] == 0 and log_prob.grad[1] > 0


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo", "reinforce"])
def test_no_tokens(kind):
    none = torch.zeros(0)
    got = policy_term(Algorithm(policy_loss=kind), none, none, none, none.bool(), none.long())
    assert got.loss.shape == got.ratio.shape == got.clipped.shape == (0,)
