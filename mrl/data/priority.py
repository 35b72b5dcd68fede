"""The curriculum: how likely a prompt is to be drawn in an epoch, by how well the model did on it last time."""
from __future__ import annotations

import hashlib
from typing import Literal


class Priority:
    """Remembers each prompt's last accuracy, and decides in each epoch which prompts are worth another group.

    A prompt is drawn in an epoch with probability
        failure       1 - accuracy                        (Kimi k1.5, Kimi Team 2025)
        learnability  4 * accuracy * (1 - accuracy)       (Foster and Foerster 2025: the variance of a right answer)
    but at least `floor`, so that none is forgotten for good; one that has not been sampled yet, always.

    Args:
        floor: > 0.
        seed: the run's seed, of which and of the epoch and row each decision is a pure function.
    """

    def __init__(self, by: Literal["failure", "learnability"], floor: float, seed: int):
        self._by, self._floor, self._seed = by, floor, seed
        self._accuracy: dict[int, float] = {}

    def probability(self, row: int) -> float:
        """How likely the prompt of this row is to be drawn in an epoch: in [floor, 1]."""
        if row not in self._accuracy:
            return 1.0
        right = self._accuracy[row]
        return max(self._floor, 1 - right if self._by == "failure" else 4 * right * (1 - right))

    def draws(self, epoch: int, row: int) -> bool:
        """Whether the prompt is drawn when its turn comes in `epoch`."""
        digest = hashlib.blake2b(f"{self._seed}:{epoch}:{row}:priority".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.probability(row) * 2.0 ** 64

    def record(self, row: int, accuracy: float) -> None:
        """Note the share of right answers, in [0, 1], in the newest group of the row's prompt."""
        self._accuracy[row] = accuracy

    def state(self) -> list[tuple[int, float]]:
        """What a checkpoint keeps (JSON-able): (row, accuracy) of every prompt seen."""
        return sorted(self._accuracy.items())

    def restore(self, state: list[tuple[int, float]]) -> None:
        """Go on where `state()` was taken."""
        self._accuracy = {int(row): float(accuracy) for row, accuracy in state}
