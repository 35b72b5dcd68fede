"""Held-out accuracy from evaluation groups: mean@n, best@n, maj@n."""
from __future__ import annotations

from collections import Counter

from mrl.rollout.types import Group


def evaluation_metrics(groups: list[Group]) -> dict[str, float]:
    """Averages over prompts of n samples each.

    mean@n: mean reward of the samples; best@n: the best sample's reward; maj@n: the reward of the answer given most
    often, the earlier one on a tie (answers compared as the reward extracted them; a sample without an answer does not
    vote, and a prompt without any scores 0); left out when the reward extracts no answers at all.
    """
    n = max(len(group.trajectories) for group in groups)
    mean = best = majority = 0.0
    for group in groups:
        rewards = [t.reward for t in group.trajectories]
        mean += sum(rewards) / len(rewards)
        best += max(rewards)
        votes = Counter(t.extracted for t in group.trajectories if t.extracted)
        if votes:
            winner = votes.most_common(1)[0][0]
            majority += next(t.reward for t in group.trajectories if t.extracted == winner)
    voted = any(t.extracted for group in groups for t in group.trajectories)
    return {
        f"eval/mean@{n}": mean / len(groups),
        f"eval/best@{n}": best / len(groups),
        **({f"eval/maj@{n}": majority / len(groups)} if voted else {}),
        "eval/groups_regenerated": sum(group.regenerated for group in groups),
        "eval/prompts": len(groups),
        "eval/truncated": sum(t.finish_reason == "length" for g in groups for t in g.trajectories) / n / len(groups),
    }
