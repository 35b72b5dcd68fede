"""Whose turn it is with the memory of GPUs that trainers and engines share.

                    trainers hold                        engines hold
    to_train        weights, optimizer, gradients        nothing: they sleep
    to_push         weights                              weights
    to_generate     nothing                              weights, cache: their gates are open

Each side gives memory up before the other takes it. A push goes from one side's weights to the other's, so only then
do both have theirs. Buffers of a sync, contexts and CUDA graphs stay where they are all the time.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Callable, Literal

from mrl.engine.api import MemoryPart
from mrl.observe.clock import Clock
from mrl.platform import Platform
from mrl.rollout.service import RolloutService

if TYPE_CHECKING:  # what is tested around stand-ins needs no Megatron
    from mrl.trainer.offload import Offload, Part

GB = 1e9


class Turns:
    """On every trainer rank; the methods are collective, and do only what is not so already.

    offload: of the policy; None: the trainers keep their memory. sleeps: whether engines give theirs up; else they are
    left alone. meet: returns when all ranks have called it. rollouts: on rank 0. clock: gets the timings "offload",
    "onload", "sleep" and "wake". In the beginning it is the trainers' turn, and the engines sleep.
    """

    def __init__(self, platform: Platform, offload: Offload | None, sleeps: bool, meet: Callable[[], None],
                 rollouts: RolloutService | None, clock: Clock) -> None:
        self.platform, self.offload, self.sleeps, self.meet = platform, offload, sleeps, meet
        self.rollouts, self.clock = rollouts, clock
        self.turn: Literal["train", "push", "generate"] = "train"
        self.copied = {"offload": 0, "onload": 0}
        self.beside = 0

    def to_train(self) -> None:
        """The engines' requests in flight are aborted."""
        if self.turn == "generate":
            self._sleep()
            self._onload("weights", "optimizer")
        self.turn = "train"
        self.beside = self.platform.used_beside()

    def to_push(self) -> None:
        """From the engines' turn, too, when one of them has come back without weights: then all sleep for a moment."""
        if self.turn == "generate":
            self._sleep()
            self._onload("weights")
        else:
            self._offload("optimizer")
        self._wake("weights")
        self.turn = "push"

    def to_generate(self) -> None:
        """After a push. Engines that it did not reach stay closed."""
        self._offload("weights")
        self._wake("kv_cache")
        self.turn = "generate"

    def metrics(self) -> dict[str, float]:
        """Of this rank since the last call, in 10^9 bytes: `memory/peak_gb` of this process; and with turns, copied to
        the host and back, and in use beside this process's tensors when training began."""
        found = {"peak": self.platform.memory()["peak"] * 2**30 / GB}
        if self.offload:
            found |= {name: count / GB for name, count in self.copied.items()}
        if self.sleeps:
            found["beside"] = self.beside / GB
        self.platform.start_peak()
        self.copied = dict.fromkeys(self.copied, 0)
        return {f"memory/{name}_gb": value for name, value in found.items()}

    def _offload(self, part: Part) -> None:
        if self.offload:
            with self.clock("offload"):
                self.copied["offload"] += self.offload.release(part)
                self.platform.release_cache()

    def _onload(self, *parts: Part) -> None:
        if self.offload:
            with self.clock("onload"):
                self.copied["onload"] += self.offload.restore(*parts)

    def _sleep(self) -> None:
        if self.sleeps:
            with self.clock("sleep"):
                if self.rollouts:
                    self.rollouts.sleep()
                self.meet()  # no rank takes what an engine still holds

    def _wake(self, part: MemoryPart) -> None:
        if self.sleeps:
            with self.clock("wake"):
                self.meet()  # no engine takes what a rank still holds
                if self.rollouts:
                    self.rollouts.wake(part)
                self.meet()
