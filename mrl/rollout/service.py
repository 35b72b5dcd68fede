"""Rank 0's side of the rollouts: which prompts come next, who is asked, and what is still missing.

While anything is missing a thread takes in finished groups and asks for what replaces rejected ones, so that this goes
on while rank 0 trains. `lock` is for what the thread and the step loop both change.
"""
from __future__ import annotations

import threading
import time
from typing import Any, Callable

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from mrl.config.schema import Experiment
from mrl.data.order import PromptOrder
from mrl.data.priority import Priority
from mrl.engine.api import EngineStatus, MemoryPart, Version
from mrl.rollout.draw import StepDraw
from mrl.rollout.types import Group, GroupRequest, Kind

POLL_S = 0.5
ANSWER_TIMEOUT_S = 120.0
"""How long an actor may take over a call that does no work."""
RESTART_POLL_S = 0.1
CLOSE_TIMEOUT_S = 10.0
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
        self.order = _order(experiment, training) if training else None
        self.heldout = sizes
        self.missing: list[dict[tuple[Kind, int], tuple[GroupRequest, Version]]] = [{} for _ in workers]
        self.groups: dict[Kind, list[Group]] = {"train": [], "eval": []}
        self.draw: StepDraw | None = None  # of the training batch asked for and not settled yet
        self.settled_metrics: dict[str, float] = {}
        self.batch_metrics: dict[str, float] = {}
        """How the batch last taken came about."""
        self.polls: dict = {}
        self.dealt = 0
        self.lock = threading.RLock()
        self.intake: threading.Thread | None = None  # runs while anything is missing
        self.failure: Exception | None = None
        self.closed = False
        self.served = Version(0, 0)
        self.failed_pushes = [0] * len(engines)

    def ask_training(self, step: int, version: Version) -> None:
        """Ask for batch `step`, when the one before has been taken; the engines serve `version` now.

        Groups that rollout.filters reject are replaced as they come in, until the batch is whole.
        """
        with self.lock:
            self.draw = StepDraw(self.experiment, step, version)
            self._draw_prompts()

    def ask_evaluation(self, version: Version) -> None:
        """Ask for every held-out prompt, of all data sets; the engines serve `version` now."""
        datasets = self.experiment.eval.datasets
        prompts = [(name, row) for name, size in self.heldout.items() for row in range(size)]
        with self.lock:
            self._ask([GroupRequest(i, row, version.step, datasets[name].samples_per_prompt, "eval", name)
                       for i, (name, row) in enumerate(prompts)], version)

    def wait(self, beat: Callable[[], None]) -> list[int]:
        """Wait until everything asked for is there: []. Or until engines need the current weights: their indices.

        Raises TimeoutError after loop.collect_timeout_s, RuntimeError when a group cannot be had or no engine is left.
        """
        limit = self.experiment.loop.collect_timeout_s
        deadline = time.monotonic() + limit
        while (intake := self.intake) and not self.failure:
            beat()
            if behind := self._behind_the_last_push():
                return behind
            if time.monotonic() > deadline:
                raise TimeoutError(f"after loop.collect_timeout_s={limit:.0f} s, {sum(map(len, self.missing))} groups "
                                   f"are still missing")
            intake.join(POLL_S)
        if self.failure:
            raise self.failure
        return []

    def take(self, kind: Kind) -> list[Group]:
        """What `wait` waited for, in the order of group ids."""
        groups = sorted(self.groups[kind], key=lambda group: group.request.group_id)
        self.groups[kind] = []
        if kind == "train":
            self.batch_metrics, self.settled_metrics = self.settled_metrics, {}
        return groups

    def sleep(self) -> None:
        """Return when no engine holds memory of its GPUs any more. What they sample is aborted; workers ask again."""
        self._of_engines("sleep")

    def wake(self, part: MemoryPart) -> None:
        """Let the engines that are up take that memory back: for weights, then, pushed to, for the cache."""
        self._of_engines("wake", part)

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
        """What a checkpoint keeps (JSON-able). A batch that is not settled is not part of it: it is asked for again."""
        return {"order": self.order.state(), "batch_metrics": self.batch_metrics}

    def restore(self, state: dict) -> None:
        """Go on where `state()` was taken."""
        self.order.restore(state["order"])
        self.batch_metrics = state["batch_metrics"]

    def close(self) -> None:
        """End the thread, whatever is still missing: it must not use Ray when Ray ends."""
        self.closed = True
        if intake := self.intake:
            intake.join(CLOSE_TIMEOUT_S)

    def _draw_prompts(self) -> None:
        """Ask for as many prompts as the draw wants now."""
        draw, new = self.draw, []
        position = draw.requests[-1].group_id + 1 if draw.requests else self.order.position
        samples, baseline = self.experiment.batch.samples_per_prompt, self.experiment.algorithm.name == "remax"
        for _ in range(draw.wanted()):
            number = self.order.first_from(position)
            new.append(GroupRequest(number, self.order.at(number).row, draw.step, samples, "train", baseline=baseline))
            position = number + 1
        draw.requests += new
        self._ask(new, draw.version)

    def _settle(self) -> None:
        """The batch is whole, or the limit is reached: hand it over, and forget what was drawn beyond it."""
        draw, self.draw = self.draw, None
        self._drop(draw.not_needed())
        used, batch, rollout = draw.used(), draw.batch(), self.experiment.rollout
        for request in used:
            self.order.record(request.prompt_index, draw.accuracy[request.group_id])
        self.order.move_to(used[-1].group_id + 1)
        if len(batch) < draw.needed and rollout.dynamic_sampling.at_limit == "error":
            raise RuntimeError(
                f"of the {draw.limit} prompts of step {draw.step}, rollout.filters kept {len(batch)} groups where a "
                f"batch needs {draw.needed}: raise rollout.dynamic_sampling.max_gen_batches, set its at_limit: train, "
                "loosen the filters, or give prompts of another difficulty")
        self.groups["train"], self.settled_metrics = batch, draw.metrics()

    def _drop(self, requests: list[GroupRequest]) -> None:
        for index, missing in enumerate(self.missing):
            for request in requests:
                missing.pop((request.kind, request.group_id), None)
            if requests:
                # A worker that has died meanwhile has forgotten them too.
                _answer(self.workers[index].drop.remote(requests), f"rollout worker {index}", default=None)

    def _ask(self, requests: list[GroupRequest], version: Version) -> None:
        shares: list[list[GroupRequest]] = [[] for _ in self.workers]
        for request in requests:
            index = self.dealt % len(shares)
            shares[index].append(request)
            self.missing[index][request.kind, request.group_id] = (request, version)
            self.dealt += 1
        for index, share in enumerate(shares):
            if not share:
                continue
            try:
                _answer(self.workers[index].ask.remote(share, version), f"rollout worker {index}")
            except RayActorError:
                self._ask_again(index)
        if any(self.missing) and self.intake is None:
            self.intake = threading.Thread(target=self._take_in, name="rollout-intake", daemon=True)
            self.intake.start()

    def _take_in(self) -> None:
        """The thread: until nothing is missing, or something breaks, which `wait` then raises."""
        try:
            while not self.closed:
                self._poll()
                with self.lock:
                    if not any(self.missing):
                        self.intake = None
                        return
        except Exception as error:
            self.failure = error
        self.intake = None

    def _poll(self) -> None:
        """Take in what is finished, and ask for what it makes necessary; returns after POLL_S at the latest."""
        for index, worker in enumerate(self.workers):
            if index not in self.polls.values():
                self.polls[worker.collect.remote(POLL_S)] = index
        ready, _ = ray.wait(list(self.polls), timeout=POLL_S)
        with self.lock:
            for reference in ready:
                index = self.polls.pop(reference)
                try:
                    groups = ray.get(reference)
                except RayActorError:
                    self._ask_again(index)
                    continue
                for group in groups:
                    self._receive(index, group)
            if self.draw and self.draw.consumed is not None:
                self._settle()
            elif self.draw:
                self._draw_prompts()

    def _receive(self, index: int, group: Group) -> None:
        kind, missing = group.request.kind, self.missing[index]
        wanted, _ = missing.get((kind, group.request.group_id), (None, None))
        if wanted != group.request:
            return  # dropped while it was on its way
        del missing[kind, group.request.group_id]
        if kind == "train":
            self.draw.add(group)
        else:
            self.groups["eval"].append(group)

    def _ask_again(self, index: int) -> None:
        """A worker died, and Ray restarted it empty: all that it still owes is asked for again."""
        self._revive(index, "prepare", self.kinds)
        by_version: dict[Version, list[GroupRequest]] = {}
        for request, version in self.missing[index].values():
            by_version.setdefault(version, []).append(request)
        for version, requests in by_version.items():
            _answer(self.workers[index].ask.remote(requests, version), f"rollout worker {index}")

    def _revive(self, index: int, method: str, *arguments: Any) -> None:
        """Call a worker that may have died since the last call; one that did is made ready first, when Ray has
        restarted it."""
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while True:
            try:
                return _answer(getattr(self.workers[index], method).remote(*arguments), f"rollout worker {index}")
            except RayActorError:
                if time.monotonic() > deadline:
                    raise
                method, arguments = "prepare", (self.kinds,)
                time.sleep(RESTART_POLL_S)

    def _of_engines(self, method: str, *arguments: Any) -> None:
        """Call all engines at once. One may have to come up first; one whose gate has died counts as failed."""
        timeout_s = ANSWER_TIMEOUT_S + self.experiment.rollout.start_timeout_s
        calls = [getattr(engine, method).remote(*arguments) for engine in self.engines]
        for index, call in enumerate(calls):
            _answer(call, f"engine {index}", default=None, timeout_s=timeout_s)

    def _behind_the_last_push(self) -> list[int]:
        statuses = self._statuses()
        if all(status.state == "failed" for status in statuses):
            raise RuntimeError(f"no engine is left: {statuses[0].error}")
        return [status.index for status in statuses
                if status.state in ("dirty", "asleep") or status.state == "serving" and status.version < self.served]

    def _statuses(self) -> list[EngineStatus]:
        def gone(index: int) -> EngineStatus:
            return EngineStatus(index, 0, "failed", None, 0, f"the gate of engine {index} died", 0)

        return [_answer(engine.status.remote(), f"engine {index}", default=gone(index))
                for index, engine in enumerate(self.engines)]


def _order(experiment: Experiment, rows: int) -> PromptOrder:
    priority, seed = experiment.rollout.priority, experiment.seed
    return PromptOrder(rows, seed, experiment.data.shuffle,
                       None if priority.by == "none" else Priority(priority.by, priority.floor, seed))


_RAISE = object()


def _answer(reference: Any, name: str, default: Any = _RAISE, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
    """What an actor answers; `default`, if given, when it has died. TimeoutError naming it when it is stuck."""
    try:
        return ray.get(reference, timeout=timeout_s)
    except GetTimeoutError:
        raise TimeoutError(f"{name} has not answered for {timeout_s:.0f} s") from None
    except RayActorError:
        if default is _RAISE:
            raise
        return default
