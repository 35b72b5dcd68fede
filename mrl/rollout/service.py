"""Rank 0's side of the rollouts: which prompts come next, who is asked, and what is still missing."""
from __future__ import annotations

import time
from typing import Any, Callable

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from mrl.config.schema import Experiment
from mrl.data.order import PromptOrder
from mrl.engine.api import EngineStatus, Version
from mrl.rollout.types import Group, GroupRequest, Kind

POLL_S = 0.5
ANSWER_TIMEOUT_S = 120.0
"""How long an actor may take over a call that does no work."""
FAILED_PUSHES_ALLOWED = 3


class RolloutService:
    """Asks the rollout workers for groups and waits for them; tells when an engine needs weights.

    workers, engines: Ray handles of RolloutWorker and EngineServer actors. kinds: which prompts the workers hold.
    """

    def __init__(self, experiment: Experiment, workers: list, engines: list, attempt: int = 0,
                 kinds: tuple[Kind, ...] = ("train", "eval")):
        """`attempt`: requests that earlier attempts of the trainers made are dropped, and their pushes refused."""
        self.experiment, self.workers, self.engines, self.kinds = experiment, workers, engines, kinds
        for index in range(len(workers)):
            self._revive(index, "cancel")
        for index, engine in enumerate(engines):
            _answer(engine.abort.remote(attempt), f"engine {index}", default=None)
        sizes: dict[str, int] = _answer(workers[0].sizes.remote(), "rollout worker 0")
        training = sizes.pop("")
        self.order = PromptOrder(training, experiment.seed, experiment.data.shuffle) if training else None
        self.heldout = sizes
        self.missing: list[dict[tuple[Kind, int], tuple[GroupRequest, Version]]] = [{} for _ in workers]
        self.groups: dict[Kind, list[Group]] = {"train": [], "eval": []}
        self.polls: dict = {}
        self.dealt = 0
        self.served = Version(0, 0)
        self.failed_pushes = [0] * len(engines)

    def ask_training(self, step: int, version: Version) -> None:
        """Ask for batch `step`; the engines serve `version` now."""
        batch, first = self.experiment.batch, self.order.position
        self._ask([GroupRequest(first + i, draw.row, step, batch.samples_per_prompt, "train")
                   for i, draw in enumerate(self.order.take(batch.prompts_per_step))], version)

    def ask_evaluation(self, version: Version) -> None:
        """Ask for every held-out prompt, of all data sets; the engines serve `version` now."""
        prompts = [(name, row) for name, size in self.heldout.items() for row in range(size)]
        self._ask([GroupRequest(i, row, version.step, self.experiment.eval.datasets[name].samples_per_prompt, "eval", name)
                   for i, (name, row) in enumerate(prompts)], version)

    def wait(self, beat: Callable[[], None]) -> list[int]:
        """Wait until everything asked for is there: []. Or until engines need the current weights: their indices.

        Raises TimeoutError after loop.collect_timeout_s, RuntimeError when a group cannot be had or no engine is left.
        """
        limit = self.experiment.loop.collect_timeout_s
        deadline = time.monotonic() + limit
        while any(self.missing):
            beat()
            self._poll()
            if behind := self._behind_the_last_push():
                return behind
            if time.monotonic() > deadline:
                raise TimeoutError(f"after loop.collect_timeout_s={limit:.0f} s, {sum(map(len, self.missing))} groups "
                                   f"are still missing")
        return []

    def take(self, kind: Kind) -> list[Group]:
        """What `wait` waited for, in the order of group ids."""
        groups = sorted(self.groups[kind], key=lambda group: group.request.group_id)
        self.groups[kind] = []
        return groups

    def without(self, version: Version) -> list[int]:
        """The engines that do not serve `version` yet."""
        return [status.index for status in self._statuses() if status.state != "serving" or status.version != version]

    def pushed(self, version: Version, errors: dict[int, str | None]) -> None:
        """Note how a push went, by engine that took part. Raises RuntimeError when one engine keeps refusing."""
        self.served = version
        for index, error in errors.items():
            self.failed_pushes[index] = self.failed_pushes[index] + 1 if error else 0
            if self.failed_pushes[index] >= FAILED_PUSHES_ALLOWED:
                raise RuntimeError(f"engine {index} refused the weights {FAILED_PUSHES_ALLOWED} times: {error}")

    def state(self) -> dict:
        return self.order.state()

    def restore(self, state: dict) -> None:
        self.order.restore(state)

    def _ask(self, requests: list[GroupRequest], version: Version) -> None:
        shares: list[list[GroupRequest]] = [[] for _ in self.workers]
        for request in requests:
            index = self.dealt % len(shares)
            shares[index].append(request)
            self.missing[index][request.kind, request.group_id] = (request, version)
            self.dealt += 1
        for index, share in enumerate(shares):
            try:
                _answer(self.workers[index].ask.remote(share, version), f"rollout worker {index}")
            except RayActorError:
                self._ask_again(index)

    def _poll(self) -> None:
        """Move finished groups here; returns after POLL_S at the latest."""
        for index, worker in enumerate(self.workers):
            if index not in self.polls.values():
                self.polls[worker.collect.remote(POLL_S)] = index
        ready, _ = ray.wait(list(self.polls), timeout=POLL_S)
        for reference in ready:
            index = self.polls.pop(reference)
            try:
                groups = ray.get(reference)
            except RayActorError:
                self._ask_again(index)
                continue
            for group in groups:
                del self.missing[index][group.request.kind, group.request.group_id]
                self.groups[group.request.kind].append(group)

    def _ask_again(self, index: int) -> None:
        """A worker died, and Ray restarted it empty: all that it still owes is asked for again."""
        self._revive(index, "prepare", self.kinds)
        by_version: dict[Version, list[GroupRequest]] = {}
        for request, version in self.missing[index].values():
            by_version.setdefault(version, []).append(request)
        for version, requests in by_version.items():
            _answer(self.workers[index].ask.remote(requests, version), f"rollout worker {index}")

    def _revive(self, index: int, method: str, *arguments: Any) -> None:
        """Call a worker that may have died since the last call; one that did is made ready first."""
        worker, name = self.workers[index], f"rollout worker {index}"
        try:
            _answer(getattr(worker, method).remote(*arguments), name)
        except RayActorError:
            _answer(worker.prepare.remote(self.kinds), name)

    def _behind_the_last_push(self) -> list[int]:
        statuses = self._statuses()
        if all(status.state == "failed" for status in statuses):
            raise RuntimeError(f"no engine is left: {statuses[0].error}")
        return [status.index for status in statuses
                if status.state == "dirty" or status.state == "serving" and status.version < self.served]

    def _statuses(self) -> list[EngineStatus]:
        def gone(index: int) -> EngineStatus:
            return EngineStatus(index, 0, "failed", None, 0, f"the gate of engine {index} died", 0)

        return [_answer(engine.status.remote(), f"engine {index}", default=gone(index))
                for index, engine in enumerate(self.engines)]


_RAISE = object()


def _answer(reference: Any, name: str, default: Any = _RAISE) -> Any:
    """What an actor answers; `default`, if given, when it has died. TimeoutError naming it when it is stuck."""
    try:
        return ray.get(reference, timeout=ANSWER_TIMEOUT_S)
    except GetTimeoutError:
        raise TimeoutError(f"{name} has not answered for {ANSWER_TIMEOUT_S:.0f} s") from None
    except RayActorError:
        if default is _RAISE:
            raise
        return default
