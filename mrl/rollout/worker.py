"""The rollout worker: turns group requests into groups of scored trajectories, off the trainers' interpreter.

A Ray actor on CPU. It owns the prompts, the tokenizer and the verifiers, and reaches engines only through their gates.
"""
from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Callable, Sequence

import numpy as np

from mrl.algorithm.shaping import overlong_penalty
from mrl.config.schema import Experiment
from mrl.data.prompts import load_prompts
from mrl.data.seeds import request_seed
from mrl.data.tokenize import PromptEncoder
from mrl.engine.api import GenerateRequest, Version
from mrl.reward.pool import RewardPool
from mrl.rollout.router import Router
from mrl.rollout.types import Group, GroupRequest, Kind, Trajectory


class RolloutWorker:
    """Answers `ask` at once and `collect` when groups are done; groups of an earlier attempt can be cancelled."""

    def __init__(self, experiment: Experiment, find_engines: Callable[[], list]):
        """`find_engines` gives the handles: a worker that Ray restarts must find them anew."""
        self.experiment = experiment
        self.router = Router(find_engines(), experiment.loop.collect_timeout_s)
        self.encoder = PromptEncoder(experiment.model.path, experiment.data, experiment.model.chat_template)
        self.rewards = RewardPool(experiment.reward)
        self.rows: dict[Kind, list[dict]] = {"train": [], "eval": []}
        self.prompts: dict[Kind, list[list[int]]] = {"train": [], "eval": []}
        self.done: list[Group] = []
        self.tasks: dict[GroupRequest, asyncio.Task] = {}
        self.failure: BaseException | None = None
        self.progress = asyncio.Event()

    async def prepare(self, kinds: Sequence[Kind]) -> None:
        """Read, tokenise and check the prompts and reference answers of `kinds`. Raises what is wrong, by row."""
        data = self.experiment.data
        for kind in kinds:
            source = data.train if kind == "train" else data.eval
            if source:
                rows = load_prompts(source, data)
                await self.rewards.check_answers([row[data.answer_key] for row in rows])
                self.rows[kind], self.prompts[kind] = self.encoder.encode_all(rows)

    async def sizes(self) -> dict[Kind, int]:
        """Usable prompts of each kind."""
        return {kind: len(rows) for kind, rows in self.rows.items()}

    async def ask(self, requests: list[GroupRequest], version: Version) -> None:
        """Begin sampling `requests`; `version` is what the engines serve now."""
        for request in requests:
            task = asyncio.get_running_loop().create_task(self._run_group(request, version))
            self.tasks[request] = task
            task.add_done_callback(partial(self._finished, request))

    async def collect(self, timeout_s: float) -> list[Group]:
        """The groups finished since the last call, as soon as there are any; none after `timeout_s`.

        Raises what broke a group.
        """
        deadline = time.monotonic() + timeout_s
        while not self.done and self.failure is None and (left := deadline - time.monotonic()) > 0:
            self.progress.clear()
            try:
                await asyncio.wait_for(self.progress.wait(), left)
            except TimeoutError:
                break
        if self.failure is not None:
            raise RuntimeError(f"a rollout failed: {self.failure!r}") from self.failure
        done, self.done = self.done, []
        return done

    async def cancel(self) -> None:
        """Forget everything asked for so far: the trainers were restarted and will ask again."""
        await self.drop(list(self.tasks))
        self.failure, self.done = None, []

    async def drop(self, requests: list[GroupRequest]) -> None:
        """Forget these requests, finished or not: the batch is whole without them."""
        tasks = [task for request in requests if (task := self.tasks.get(request))]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.done = [group for group in self.done if group.request not in requests]

    def _finished(self, request: GroupRequest, task: asyncio.Task) -> None:
        self.tasks.pop(request, None)
        if not task.cancelled() and task.exception() is not None:
            self.failure = self.failure or task.exception()
        self.progress.set()

    async def _run_group(self, request: GroupRequest, asked: Version) -> None:
        row = self.rows[request.kind][request.prompt_index]
        group = Group(request, self.encoder.decode(self.prompts[request.kind][request.prompt_index]),
                      str(row[self.experiment.data.answer_key]), started=time.time())
        at_least = asked  # an engine that missed a push must not answer with older weights
        while True:
            sampled = await asyncio.gather(
                *(self._sample(group, i, at_least) for i in range(request.samples + request.baseline)))
            versions = {t.version for t in sampled}
            group.regenerated = group.regenerated or versions != {asked}
            if len(versions) == 1:
                break
            # An engine lost half way leaves samples of two versions behind: sample all again, from the newer one.
            at_least = max(versions)
        group.finished = time.time()
        await asyncio.gather(*(self._score(row, t) for t in sampled))
        group.trajectories, group.baseline = sampled[:request.samples], next(iter(sampled[request.samples:]), None)
        self.done.append(group)

    async def _sample(self, group: Group, sample: int, at_least: Version) -> Trajectory:
        """Sample number `sample`; the one after the last of the group is its greedy baseline."""
        experiment, request = self.experiment, group.request
        prompt, sampling = self.prompts[request.kind][request.prompt_index], experiment.rollout.sampling
        completion, losses = await self.router.generate(GenerateRequest(
            prompt_ids=prompt,
            seed=request_seed(experiment.seed, request.step, request.group_id, sample),
            max_tokens=sampling.max_response_tokens,
            temperature=self._temperature(request, sample),
            stop_token_ids=tuple(sorted({*self.encoder.stop_ids, *sampling.stop_token_ids})),
            at_least=at_least,
        ))
        group.regenerated = group.regenerated or losses > 0
        total, start = len(prompt) + len(completion.token_ids), len(prompt)
        tokens, mask, log_probs = np.empty(total, np.int64), np.zeros(total, bool), np.zeros(total, np.float32)
        tokens[:start], tokens[start:] = prompt, completion.token_ids
        mask[start:], log_probs[start:] = True, completion.log_probs
        return Trajectory(tokens, mask, log_probs, completion.version, completion.finish_reason,
                          self.encoder.decode(completion.token_ids),
                          overlong_penalty=self._penalty(request, total - start))

    def _temperature(self, request: GroupRequest, sample: int) -> float:
        if request.kind == "eval":
            return self.experiment.eval.temperature
        return self.experiment.rollout.sampling.temperature if sample < request.samples else 0.0

    def _penalty(self, request: GroupRequest, length: int) -> float:
        if request.kind == "eval":
            return 0.0
        overlong, limit = self.experiment.reward.overlong, self.experiment.rollout.sampling.max_response_tokens
        return overlong_penalty(length, limit, overlong.buffer_tokens, overlong.penalty)

    async def _score(self, row: dict, trajectory: Trajectory) -> None:
        data = self.experiment.data
        result = await self.rewards.score(
            row[data.prompt_key], trajectory.response_text, row[data.answer_key], row)
        trajectory.reward, trajectory.reward_error, trajectory.extracted = result.reward, result.error, result.extracted
