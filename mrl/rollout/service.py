"""Rank 0's side of the rollouts: which prompts come next, who is asked, and what is still missing."""
from __future__ import annotations

import time
from typing import Callable

import ray
from ray.exceptions import RayActorError

from mrl.config.schema import Experiment
from mrl.data.order import PromptOrder
from mrl.engine.api import EngineStatus, Version
from mrl.rollout.types import Group, GroupRequest, Kind

POLL_S = 0.5
FAILED_PUSHES_ALLOWED = 3


class RolloutService:
    """Asks the rollout workers for groups and waits for them; tells when an engine needs weights.

    workers, engines: Ray handles of RolloutWorker and EngineServer actors.
    """

    def __init__(self, experiment: Experiment, workers: list, engines: list, attempt: int = 0):
        """`attempt`: requests that earlier attempts of the trainers made are dropped, and their pushes refused."""
        self.experiment, self.workers, self.engines = experiment, workers, engines
        ray.get([worker.cancel.remote() for worker in workers])
        ray.get([engine.abort.remote(attempt) for engine in engines])
        sizes: dict[Kind, int] = ray.get(workers[0].sizes.remote())
        self.order = PromptOrder(sizes["train"], experiment.seed, experiment.data.shuffle)
        self.eval_prompts = min(sizes["eval"], experiment.eval.max_prompts or sizes["eval"])
        self.expected: dict[Kind, int] = {"train": 0, "eval": 0}
        self.groups: dict[Kind, list[Group]] = {"train": [], "eval": []}
        self.polls: dict = {}
        self.dealt = 0
        self.failed_pushes = [0] * len(engines)

    def ask_training(self, step: int, version: Version) -> None:
        """Ask for batch `step`; the engines serve `version` now."""
        batch, first = self.experiment.batch, self.order.position
        self._ask([GroupRequest(first + i, draw.row, step, batch.samples_per_prompt, "train")
                   for i, draw in enumerate(self.order.take(batch.prompts_per_step))], version)

    def ask_evaluation(self, version: Version) -> None:
        samples = self.experiment.eval.samples_per_prompt
        self._ask([GroupRequest(i, i, version.step, samples, "eval") for i in range(self.eval_prompts)], version)

    def wait(self, beat: Callable[[], None]) -> list[int]:
        """Wait until everything asked for is there: []. Or until engines need the current weights: their indices.

        Raises TimeoutError after loop.collect_timeout_s, RuntimeError when a group cannot be had or no engine is left.
        """
        deadline = time.monotonic() + self.experiment.loop.collect_timeout_s
        while any(len(self.groups[kind]) < n for kind, n in self.expected.items()):
            beat()
            self._poll()
            if dirty := self._engines_without_weights():
                return dirty
            if time.monotonic() > deadline:
                have = {kind: f"{len(self.groups[kind])} of {n}" for kind, n in self.expected.items() if n}
                raise TimeoutError(f"after loop.collect_timeout_s={self.experiment.loop.collect_timeout_s:.0f} these "
                                   f"groups are here: {have}")
        return []

    def take(self, kind: Kind) -> list[Group]:
        """What `wait` waited for, in the order of group ids."""
        groups = sorted(self.groups[kind], key=lambda group: group.request.group_id)
        self.groups[kind], self.expected[kind] = [], 0
        return groups

    def pushed(self, errors: dict[int, str | None]) -> None:
        """Note how a push went, by engine. Raises RuntimeError when one engine keeps refusing."""
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
            self.expected[request.kind] += 1
            shares[self.dealt % len(shares)].append(request)
            self.dealt += 1
        ray.get([worker.ask.remote(share, version) for worker, share in zip(self.workers, shares) if share])

    def _poll(self) -> None:
        """Move finished groups here; returns after POLL_S at the latest."""
        for index, worker in enumerate(self.workers):
            if index not in self.polls.values():
                self.polls[worker.collect.remote(POLL_S)] = index
        ready, _ = ray.wait(list(self.polls), timeout=POLL_S)
        for reference in ready:
            del self.polls[reference]
            for group in ray.get(reference):
                self.groups[group.request.kind].append(group)

    def _engines_without_weights(self) -> list[int]:
        statuses: list[EngineStatus] = []
        for engine in self.engines:
            try:
                statuses.append(ray.get(engine.status.remote()))
            except RayActorError as error:  # the gate itself is gone, and its server with it
                lost = f"the gate of engine {len(statuses)} died: {error}"
                statuses.append(EngineStatus(len(statuses), 0, "failed", None, 0, lost, 0))
        if all(status.state == "failed" for status in statuses):
            raise RuntimeError(f"no engine is left: {statuses[0].error}")
        return [status.index for status in statuses if status.state == "dirty"]
