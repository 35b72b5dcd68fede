"""Every advantage and every policy loss teaches a toy policy: three independent choices among four tokens."""
from __future__ import annotations

import pytest
import torch

from mrl.algorithm.advantages import Scored, estimate
from mrl.algorithm.loss import make_loss
from mrl.algorithm.weights import token_weights
from mrl.config.algorithm import Algorithm

LENGTH, VOCAB, PROMPTS, SAMPLES, STEPS = 3, 4, 4, 8, 40
GOOD = 2
"""The reward is the share of tokens that are this one."""


def expected_reward(logits: torch.Tensor) -> float:
    return float(logits.detach().softmax(-1)[:, GOOD].mean())


def batch(algorithm: Algorithm, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sampled tokens int64[B, LENGTH], and the fields of all of them in one row."""
    tokens = torch.distributions.Categorical(logits=logits.detach()).sample((PROMPTS * SAMPLES,))
    rewards = (tokens == GOOD).float().mean(1)
    greedy = float((logits.argmax(-1) == GOOD).float().mean())
    groups = [index // SAMPLES for index in range(len(tokens))]
    mask = torch.ones(LENGTH, dtype=torch.bool)
    # A critic that knows nothing but how much of the answer is still to come.
    values = torch.full((LENGTH,), float(rewards.mean()))
    advantages = estimate(algorithm, [Scored(group, float(reward), mask, greedy, values)
                                      for group, reward in zip(groups, rewards)])
    weights = torch.cat(token_weights([mask] * len(tokens), algorithm.aggregation, None, groups, LENGTH))
    old = logits.detach().log_softmax(-1)[torch.arange(LENGTH), tokens].flatten()
    return tokens, {
        "loss_mask": mask.repeat(len(tokens)), "advantage": torch.cat([a.advantage for a in advantages]),
        "rollout_log_prob": old, "ref_log_prob": torch.full_like(old, -torch.tensor(float(VOCAB)).log().item()),
        "token_weight": weights, "mean_weight": torch.full_like(old, 1 / old.numel()),
        "sequence": torch.arange(len(tokens)).repeat_interleave(LENGTH)}


@pytest.mark.parametrize("options", [
    {"name": "grpo"}, {"name": "grpo", "std": "none", "aggregation": "constant"}, {"name": "rloo"},
    {"name": "pass_at_k", "std": "biased", "pass_k": 2}, {"name": "reinforce_plus_plus"},
    {"name": "reinforce_plus_plus_baseline"}, {"name": "remax"}, {"name": "gae"},
    {"policy_loss": "gspo", "aggregation": "sequence_mean"}, {"policy_loss": "cispo"}, {"policy_loss": "reinforce"},
    {"clip": {"high": 0.28, "dual": 3.0}}, {"kl": {"coef": 0.01}, "entropy_coef": 0.01},
], ids=str)
def test_it_learns(options):
    torch.manual_seed(0)
    algorithm = Algorithm(**options)
    loss_fn = make_loss(algorithm, algorithm.kl.coef)
    logits = torch.zeros(LENGTH, VOCAB, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.05)
    assert expected_reward(logits) == pytest.approx(1 / VOCAB)
    for _ in range(STEPS):
        tokens, fields = batch(algorithm, logits)
        for _ in range(1 if algorithm.policy_loss == "reinforce" else 2):
            log_p = logits.log_softmax(-1)
            entropy = -(log_p.exp() * log_p).sum(-1).repeat(len(tokens))
            loss, _ = loss_fn(log_p[torch.arange(LENGTH), tokens].flatten(), entropy, fields)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert expected_reward(logits) > 0.6, expected_reward(logits)
