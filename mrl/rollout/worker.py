"""The rollout worker: turns group requests into groups of scored trajectories, off the trainers' interpreter.

A Ray actor on CPU. It owns the prompts, the tokenizer and the graders, and reaches engines only through their gates.
"""
from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Callable, Sequence

import numpy as np

from mrl.algorithm.shaping import overlong_penalty
from mrl.config.schema import Data, EvalDataset, Experiment, Sampling
from mrl.data.prompts import load_prompts
from mrl.data.seeds import request_seed
from mrl.data.tokenize import PromptEncoder
from mrl.engine.api import GenerateRequest, Version
from mrl.reward.api import Sample
from mrl.reward.pool import RewardPool
from mrl.rollout.router import Router
from mrl.rollout.types import Group, GroupRequest, Kind, Trajectory


@dataclass
class Source:
    """Prompts of the training data or of one held-out data set, and what is done with them.

    sampling: temperature, top_p, top_k and max_response_tokens. prompts: token ids of the `rows`, one list each.
    """

    data: Data
    rewards: RewardPool
    sampling: Sampling
    subset_key: str | None = None
    rows: list[dict] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)


class RolloutWorker:
    """Answers `ask` at once and `collect` when groups are done; groups of an earlier attempt can be cancelled."""

    def __init__(self, experiment: Experiment, find_engines: Callable[[], list],
                 find_teachers: Callable[[], list] = list):
        """`find_…` gives the handles of gates: a worker that Ray restarts must find them anew."""
        self.experiment = experiment
        self.router = Router(find_engines(), experiment.loop.collect_timeout_s)
        self.teachers = Router(find_teachers(), experiment.loop.collect_timeout_s)
        self.encoder = PromptEncoder(experiment.model.path, experiment.data, experiment.model.chat_template)
        self.rewards = RewardPool(experiment.reward)
        self.sources = {"": Source(experiment.data, self.rewards, experiment.rollout.sampling)} | {
            name: self._heldout(dataset) for name, dataset in experiment.eval.datasets.items()}
        self.done: list[Group] = []
        self.tasks: dict[GroupRequest, asyncio.Task] = {}
        self.failure: BaseException | None = None
        self.progress = asyncio.Event()

    async def prepare(self, kinds: Sequence[Kind]) -> None:
        """Read, tokenise and check the prompts and reference answers of `kinds`. Raises what is wrong, by row."""
        if "train" in kinds:
            teacher, critic = self.experiment.teacher, self.experiment.algorithm.critic.path
            if teacher:
                self.encoder.require_same_tokens(teacher.path, "teacher.path")
            if critic:
                self.encoder.require_same_tokens(critic, "algorithm.critic.path")
            await self._read(self.sources[""], self.experiment.data.train, None)
        if "eval" in kinds:
            for name, dataset in self.experiment.eval.datasets.items():
                await self._read(self.sources[name], dataset.path, dataset.max_prompts)

    async def sizes(self) -> dict[str, int]:
        """Usable prompts of the training data, under "", and of each held-out data set."""
        return {name: len(source.rows) for name, source in self.sources.items()}

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
        source = self.sources[request.dataset]
        row = source.rows[request.prompt_index]
        group = Group(request, self.encoder.decode(source.prompts[request.prompt_index]),
                      str(row[source.data.answer_key]), started=time.time(),
                      subset="" if source.subset_key is None else str(row[source.subset_key]))
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
        group.trajectories, group.baseline = sampled[:request.samples], next(iter(sampled[request.samples:]), None)
        opinions = [self._teach(group)] if self.teachers.engines and request.kind == "train" else []
        await asyncio.gather(self._score(source, row, request, sampled), *opinions)
        self.done.append(group)

    async def _sample(self, group: Group, sample: int, at_least: Version) -> Trajectory:
        """Sample number `sample`; the one after the last of the group is its greedy baseline."""
        request = group.request
        source = self.sources[request.dataset]
        prompt, sampling = source.prompts[request.prompt_index], source.sampling
        prompt_id = f"{request.dataset}/{request.prompt_index}" if request.dataset else request.group_id
        completion, losses = await self.router.generate(GenerateRequest(
            prompt_ids=prompt,
            seed=request_seed(self.experiment.seed, request.step, prompt_id, sample),
            max_tokens=sampling.max_response_tokens,
            temperature=sampling.temperature if sample < request.samples else 0.0,
            top_p=sampling.top_p, top_k=sampling.top_k,
            stop_token_ids=tuple(sorted({*self.encoder.stop_ids, *sampling.stop_token_ids})),
            at_least=at_least,
        ))
        group.regenerated = group.regenerated or losses > 0
        total, start = len(prompt) + len(completion.token_ids), len(prompt)
        tokens, mask, log_probs = np.empty(total, np.int64), np.zeros(total, bool), np.zeros(total, np.float32)
        tokens[:start], tokens[start:] = prompt, completion.token_ids
        mask[start:], log_probs[start:] = True, completion.log_probs
        experts = completion.experts
        if experts is not None:
            experts = np.pad(experts, ((0, 1), (0, 0), (0, 0)), constant_values=-1) if request.kind == "train" else None
        return Trajectory(tokens, mask, log_probs, completion.version, completion.finish_reason,
                          self.encoder.decode(completion.token_ids),
                          overlong_penalty=self._penalty(request, total - start), experts=experts)

    def _penalty(self, request: GroupRequest, length: int) -> float:
        if request.kind == "eval":
            return 0.0
        overlong, limit = self.experiment.reward.overlong, self.experiment.rollout.sampling.max_response_tokens
        return overlong_penalty(length, limit, overlong.buffer_tokens, overlong.penalty)

    async def _score(self, source: Source, row: dict, request: GroupRequest, trajectories: list[Trajectory]) -> None:
        data, group = source.data, f"{request.kind} group {request.group_id} (row {request.prompt_index})"
        samples = [Sample(row[data.prompt_key], t.response_text, row[data.answer_key], row, t.response_length,
                          name=f"sample {i} of {group}") for i, t in enumerate(trajectories)]
        for t, result in zip(trajectories, await source.rewards.score(samples), strict=True):
            t.reward, t.correct, t.reward_error = result.reward, result.correct, result.error
            t.extracted = result.extracted
            t.reward_parts = dict(result.parts)

    async def _teach(self, group: Group) -> None:
        begun = time.time()
        answers = await asyncio.gather(*(self.teachers.score(t.tokens.tolist()) for t in group.trajectories))
        for t, log_probs in zip(group.trajectories, answers, strict=True):
            t.teacher_log_prob = np.where(t.loss_mask, np.array(log_probs, np.float32), np.float32(0))
        group.taught = begun, time.time()

    def _heldout(self, dataset: EvalDataset) -> Source:
        """A held-out data set, not read yet; what it does not say itself is as in training."""
        own = dataset.sampling.model_dump(exclude_none=True)
        return Source(dataset.columns(self.experiment.data),
                      self.rewards if dataset.reward is None else RewardPool(dataset.reward),
                      self.experiment.rollout.sampling.model_copy(update=own), dataset.subset_key)

    async def _read(self, source: Source, path: str, max_prompts: int | None) -> None:
        rows = load_prompts(path, source.data, source.subset_key)
        await source.rewards.check_answers([(row[source.data.answer_key], row) for row in rows])
        model = self.experiment.model
        encoder = self.encoder if source.data == self.experiment.data else (
            PromptEncoder(model.path, source.data, model.chat_template))
        rows, prompts = encoder.encode_all(rows)
        source.rows, source.prompts = rows[:max_prompts], prompts[:max_prompts]
