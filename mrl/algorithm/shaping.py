"""What is added to a reward for the form of a response."""
from __future__ import annotations


def overlong_penalty(length: int, limit: int, buffer: int, penalty: float) -> float:
    """Soft overlong punishment (DAPO, Yu et al. 2025, eq. 13): what a response loses for coming close to the limit.

    0 up to limit - buffer tokens, from there falling in a straight line to -penalty at `limit`, and no further.

    Args:
        length: tokens of the response.
        limit: the longest response, L_max.
        buffer: the last tokens before it, L_cache, at most `limit`; 0: no penalty at all.
        penalty: >= 0; DAPO: 1.

    Returns:
        the penalty, <= 0, to be added to the reward.
    """
    if buffer == 0:
        return 0.0
    excess = length - (limit - buffer)
    return -penalty * min(max(excess / buffer, 0.0), 1.0)
