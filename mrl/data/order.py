"""In which order prompts are drawn: an endless stream that is a pure function of its position, hence resumable.

With a priority, some positions are passed over, by what was recorded about their prompts: the state keeps that too.
"""
from __future__ import annotations

import hashlib
from typing import Any, NamedTuple, Optional

from mrl.data.priority import Priority


class Draw(NamedTuple):
    """What stands at one position of the stream: a 0-based row, and how many times all rows came before."""

    epoch: int
    row: int


class PromptOrder:
    """Every row once an epoch, shuffled anew from (seed, epoch), across steps, resumes and epoch boundaries.

    Args:
        rows: size of the data set.
        seed: the run's seed.
        shuffle: false keeps the file's order in every epoch.
        priority: which prompts an epoch passes over; None: none.
    """

    def __init__(self, rows: int, seed: int, shuffle: bool, priority: Optional[Priority] = None):
        if rows < 1:
            raise ValueError(f"a data set of {rows} rows has no order: it needs at least one")
        self._identity = {"rows": rows, "seed": seed, "shuffle": shuffle}
        self._rows, self._seed, self._shuffle, self._priority = rows, seed, shuffle, priority
        self._position = 0
        # The epoch in progress and its order: what `at` would otherwise compute again for every position.
        self._permutation: tuple[int, list[int]] = (-1, [])

    @property
    def position(self) -> int:
        """Where the stream stands. Positions count on over epochs and resumes, so each identifies one draw."""
        return self._position

    def at(self, position: int) -> Draw:
        """What stands at a position of the stream; does not move it."""
        epoch, place = divmod(position, self._rows)
        if not self._shuffle:
            return Draw(epoch, place)
        if self._permutation[0] != epoch:
            self._permutation = (epoch, self._shuffled(epoch))
        return Draw(epoch, self._permutation[1][place])

    def first_from(self, position: int) -> int:
        """The first position from `position` on that is not passed over; does not move the stream."""
        while self._priority and not self._priority.draws(*self.at(position)):
            position += 1
        return position

    def take(self, count: int) -> list[Draw]:
        """The next `count` prompts; moves the stream past them."""
        draws = []
        for _ in range(count):
            position = self.first_from(self._position)
            draws.append(self.at(position))
            self._position = position + 1
        return draws

    def move_to(self, position: int) -> None:
        """Let the stream stand at `position`: everything before it has been used."""
        self._position = position

    def record(self, row: int, accuracy: float) -> None:
        """Tell the priority, if there is one, the share of right answers in the newest group of a row's prompt."""
        if self._priority:
            self._priority.record(row, accuracy)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps (JSON-able)."""
        return {"position": self._position, "priority": self._priority and self._priority.state()} | self._identity

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state()` was taken.

        Raises:
            ValueError: the checkpoint was written with another number of rows, seed or shuffling. Its position would
                stand for other prompts, so some would be repeated and others never seen.
        """
        for name, value in self._identity.items():
            if state.get(name) != value:
                raise ValueError(f"the checkpoint's prompt order has {name} {state.get(name)}, this run has {value}: "
                                 "resume with the same data set, seed and data.shuffle, or start a new run")
        self._position = int(state["position"])
        if self._priority:
            self._priority.restore(state["priority"])

    def _shuffled(self, epoch: int) -> list[int]:
        # Sorting by hash is a permutation that no version of Python or NumPy can change under a checkpoint.
        def key(row: int) -> bytes:
            return hashlib.blake2b(f"{self._seed}:{epoch}:{row}".encode(), digest_size=16).digest()

        return sorted(range(self._rows), key=key)
