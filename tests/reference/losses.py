"""The loss of a batch and what is logged with it, as numbers. Sequences are dicts of lists, one entry a token."""
from __future__ import annotations

from math import exp


def sampled(sequence, values):
    return [value for value, bit in zip(values, sequence["mask"]) if bit]


def token_weight(aggregation, sequence, batch, constant_tokens):
    """Of a sampled token of `sequence`."""
    with_tokens = [s for s in batch if any(s["mask"])]
    group = [s for s in batch if s["group"] == sequence["group"]]
    prompts = {s["group"] for s in with_tokens}
    return {
        "token_mean": lambda: 1 / sum(sum(s["mask"]) for s in batch),
        "sequence_mean": lambda: 1 / len(with_tokens) / sum(sequence["mask"]),
        "sequence_mean_token_sum": lambda: 1 / len(with_tokens),
        "prompt_mean": lambda: 1 / len(prompts) / sum(sum(s["mask"]) for s in group),
        "constant": lambda: 1 / len(with_tokens) / constant_tokens,
    }[aggregation]()


def clip(x, low, high):
    return min(max(x, low), high)


def policy(kind, log_prob, ratio, advantage, low, high, dual):
    """Loss of one token; `ratio` is the token's, or for gspo the sequence's."""
    bounded = clip(ratio, 1 - low, 1 + high)
    if kind in ("ppo", "gspo"):
        objective = min(ratio * advantage, bounded * advantage)
        if dual is not None and advantage < 0:
            objective = max(objective, dual * advantage)
        return -objective
    if kind == "cispo":
        return -bounded * advantage * log_prob
    return -advantage * log_prob


def importance(kind, raw, floor, cap):
    if kind == "none":
        return 1.0
    if kind == "mask":
        return raw if floor <= raw <= cap else 0.0
    return clip(raw, floor, cap)


def divergence(estimator, log_prob, ref):
    d = log_prob - ref
    return {"k1": d, "k2": d * d / 2, "k3": exp(-d) - 1 + d}[estimator]


def sequence_ratio(sequence, new, old):
    """The geometric mean of its tokens' ratios."""
    differences = sampled(sequence, [a - b for a, b in zip(new, old)])
    return exp(sum(differences) / len(differences))


def loss(batch, algorithm, kl_coef, log_prob="log_prob"):
    """Total loss, and the metrics, of a batch: field `log_prob` is the actor's.

    algorithm: a dict with policy_loss, clip (low, high, dual), aggregation, constant_tokens, old (name of the field
    with the proximal log-probs), correction (kind, level, floor, cap), kl (estimator, in_loss), entropy_coef.
    """
    a = algorithm
    total, sums = 0.0, {"policy_loss": 0.0, "kl": 0.0, "entropy": 0.0, "ratio": 0.0, "weight": 0.0, "square": 0.0,
                        "cut": 0.0, "logprob_diff": 0.0}
    tokens = sum(sum(s["mask"]) for s in batch)
    largest = 0.0
    for s in batch:
        if not any(s["mask"]):
            continue
        weight = token_weight(a["aggregation"], s, batch, a["constant_tokens"])
        new, old, rollout = s[log_prob], s[a["old"]], s["rollout"]
        drift = sampled(s, [x - y for x, y in zip(old, rollout)])
        for t, bit in enumerate(s["mask"]):
            if not bit:
                continue
            ratio = sequence_ratio(s, new, old) if a["policy_loss"] == "gspo" else exp(new[t] - old[t])
            raw = exp(sum(drift)) if a["correction"]["level"] == "sequence" else exp(old[t] - rollout[t])
            c = importance(a["correction"]["kind"], raw, a["correction"]["floor"], a["correction"]["cap"])
            term = c * policy(a["policy_loss"], new[t], ratio, s["advantage"][t], *a["clip"])
            kl = divergence(a["kl"]["estimator"], new[t], s["ref"][t])
            total += weight * (term + (kl_coef * kl if a["kl"]["in_loss"] else 0.0)
                               - a["entropy_coef"] * s["entropy"][t])
            sums["policy_loss"] += weight * term
            outside = raw < a["correction"]["floor"] or raw > a["correction"]["cap"]
            for name, value in (("kl", kl), ("entropy", s["entropy"][t]), ("ratio", ratio), ("weight", c),
                                ("square", c * c), ("cut", outside), ("logprob_diff", abs(new[t] - rollout[t]))):
                sums[name] += value / tokens
            largest = max(largest, raw)
    ess = sums["weight"] ** 2 / sums["square"] if sums["square"] else 0.0
    return total, {**sums, "ess": ess, "largest": largest}


def gradient(batch, algorithm, kl_coef, step=1e-6):
    """d loss / d log-prob of every token, by central differences.

    Only the actor's own log-probs move: where the proximal ones are its first forward pass, they are another field.
    """
    result = []
    for s in batch:
        row = []
        for t in range(len(s["mask"])):
            values = []
            for shift in (step, -step):
                moved = dict(s, log_prob=[x + shift * (i == t) for i, x in enumerate(s["log_prob"])])
                values.append(loss([moved if other is s else other for other in batch], algorithm, kl_coef)[0])
            row.append((values[0] - values[1]) / (2 * step))
        result.append(row)
    return result
