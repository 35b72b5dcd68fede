"""Advantages of a batch of sequences, as lists of numbers."""
from __future__ import annotations

from itertools import combinations
from math import sqrt


def mean(numbers):
    return sum(numbers) / len(numbers)


def population_std(numbers):
    return sqrt(mean([(x - mean(numbers)) ** 2 for x in numbers]))


def members(groups, index):
    """Indices of all samples in the group of sample `index`."""
    return [other for other in range(len(groups)) if groups[other] == groups[index]]


def grpo(scores, groups, std):
    result = []
    for index, score in enumerate(scores):
        own = [scores[other] for other in members(groups, index)]
        if max(own) == min(own):
            result.append(0.0)
            continue
        divisor = {"none": 1.0, "biased": population_std(own),
                   "unbiased": population_std(own) * sqrt(len(own) / max(1, len(own) - 1))}[std]
        result.append((score - mean(own)) / divisor)
    return result


def rloo(scores, groups):
    result = []
    for index, score in enumerate(scores):
        others = [scores[other] for other in members(groups, index) if other != index]
        result.append(score - mean(others) if others else 0.0)
    return result


def pass_at_k(scores, groups, k, std):
    """By listing every choice of k samples."""
    result = []
    for index in range(len(scores)):
        choices = list(combinations(members(groups, index), k))
        best = [max(scores[i] for i in choice) for choice in choices]
        mine = [value for value, choice in zip(best, choices) if index in choice]
        if len(choices) < 2 or max(best) == min(best):
            result.append(0.0)
            continue
        result.append((mean(mine) - mean(best)) / (population_std(best) if std != "none" else 1.0))
    return result


def rewards_of_tokens(outcome, mask, penalty):
    """One number a token; None where it was not sampled. The outcome comes with the last sampled one."""
    rewards = [-p if sampled else None for sampled, p in zip(mask, penalty)]
    last = max((t for t, sampled in enumerate(mask) if sampled), default=None)
    if last is not None:
        rewards[last] += outcome
    return rewards


def rewards_to_come(rewards):
    """Of each sampled token: what it and all later ones earn; 0 for the others."""
    return [0.0 if own is None else sum(r for r in rewards[t:] if r is not None) for t, own in enumerate(rewards)]


def gae(rewards, values, gamma, lam):
    """Advantages and returns by the definition: a sum over all later sampled tokens."""
    steps = [t for t, reward in enumerate(rewards) if reward is not None]
    advantages, returns = [0.0] * len(rewards), [0.0] * len(rewards)
    for n, t in enumerate(steps):
        for distance, later in enumerate(steps[n:]):
            is_last = later == steps[-1]
            next_value = 0.0 if is_last else values[steps[n + distance + 1]]
            delta = rewards[later] + gamma * next_value - values[later]
            advantages[t] += (gamma * lam) ** distance * delta
        returns[t] = advantages[t] + values[t]
    return advantages, returns


def whitened(advantages, masks):
    """All sampled tokens of all sequences together get mean 0 and standard deviation 1."""
    sampled = [a for row, mask in zip(advantages, masks) for a, bit in zip(row, mask) if bit]
    if not sampled or max(sampled) == min(sampled):
        return [[0.0] * len(row) for row in advantages]
    center, spread = mean(sampled), population_std(sampled)
    return [[(a - center) / spread if bit else 0.0 for a, bit in zip(row, mask)]
            for row, mask in zip(advantages, masks)]


def estimate(name, sequences, std="unbiased", k=2, gamma=1.0, lam=1.0, whiten=False):
    """Advantages and returns, a list a sequence. sequences: dicts of group, reward, mask, penalty, baseline, values."""
    groups = [s["group"] for s in sequences]
    masks = [s["mask"] for s in sequences]
    rewards = [s["reward"] for s in sequences]
    returns = None
    if name in ("grpo", "rloo", "pass_at_k"):
        scores = [r - sum(p for p, bit in zip(s["penalty"], s["mask"]) if bit) for r, s in zip(rewards, sequences)]
        per_sample = {"grpo": lambda: grpo(scores, groups, std), "rloo": lambda: rloo(scores, groups),
                      "pass_at_k": lambda: pass_at_k(scores, groups, k, std)}[name]()
        advantages = [[a if bit else 0.0 for bit in mask] for a, mask in zip(per_sample, masks)]
    elif name == "gae":
        pairs = [gae(rewards_of_tokens(r, s["mask"], s["penalty"]), s["values"], gamma, lam)
                 for r, s in zip(rewards, sequences)]
        advantages, returns = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    else:
        outcomes = {"reinforce_plus_plus": lambda: rewards,
                    "reinforce_plus_plus_baseline": lambda: grpo(rewards, groups, "none"),
                    "remax": lambda: [r - s["baseline"] for r, s in zip(rewards, sequences)]}[name]()
        advantages = [rewards_to_come(rewards_of_tokens(outcome, s["mask"], s["penalty"]))
                      for outcome, s in zip(outcomes, sequences)]
    return (whitened(advantages, masks) if whiten else advantages), returns
