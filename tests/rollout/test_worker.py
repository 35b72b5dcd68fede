"""RolloutWorker against stand-ins for engine gates: what it hands over, and what it does when versions mix."""
from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from mrl.data.prompts import DataError
from mrl.data.seeds import request_seed
from mrl.engine.api import Completion, EngineClosed, EngineLost, Version
from mrl.reward.api import RewardError
from mrl.rollout.types import GroupRequest
from mrl.rollout.worker import RolloutWorker
from tests.rollout.experiments import experiment
from tools.make_quickstart import make_model, make_tokenizer

END = make_tokenizer().eos_token_id


class Gate:
    """An engine gate that answers "46" and end-of-sequence, by the version it serves."""

    def __init__(self, version=Version(0, 3), ids=None):
        self.version, self.requests, self.generate = version, [], self
        self.ids = ids or [*make_tokenizer().encode("46"), END]
        self.before = lambda request: None

    async def remote(self, request):
        self.requests.append(request)
        await asyncio.sleep(0.001)
        self.before(request)
        if request.at_least and self.version < request.at_least:
            raise EngineClosed("older")
        return Completion(self.ids, [-0.1 * (i + 1) for i in range(len(self.ids))], "stop", self.version)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_model(path, seed=0)
    return path


@pytest.fixture
def make_worker(model, tmp_path):
    train = tmp_path / "train.jsonl"
    train.write_text("".join(json.dumps({"prompt": f"{a}+{b}=?", "answer": str(a + b)}) + "\n"
                             for a, b in ((12, 34), (1, 2))))
    made = []

    def make(gates, find_teachers=list, **sections):
        sections = {"model": {"path": str(model), "dtype": "float32"}, "data": {"train": str(train)},
                    "reward": {"kind": "exact"}, **sections}
        made.append(RolloutWorker(experiment(**sections), lambda: gates, find_teachers))
        return made[-1]

    yield make
    for worker in made:
        worker.rewards.close()


def run(worker, requests, version=Version(0, 3), kinds=("train",)):
    async def sample():
        await worker.prepare(kinds)
        await worker.ask(requests, version)
        groups = []
        while len(groups) < len(requests):
            groups += await worker.collect(300)
        return sorted(groups, key=lambda group: group.request.group_id)
    return asyncio.run(asyncio.wait_for(sample(), 60))


def test_tokens_are_the_engines_own_and_only_sampled_ones_are_trained(make_worker):
    gate = Gate()
    group, = run(make_worker([gate]), [GroupRequest(7, 0, 4, 2, "train")])
    for i, (t, request) in enumerate(zip(group.trajectories, gate.requests)):
        start = len(request.prompt_ids)
        assert t.tokens.dtype == np.int64 and t.tokens.tolist() == [*request.prompt_ids, *gate.ids]
        assert t.loss_mask.tolist() == [False] * start + [True] * 3
        np.testing.assert_allclose(t.rollout_log_prob, [0.0] * start + [-0.1, -0.2, -0.3], rtol=1e-6)
        assert request.seed == request_seed(1, 4, 7, i)
        assert (t.reward, t.response_text, t.version, t.finish_reason) == (1.0, "46", Version(0, 3), "stop")
    assert group.answer == "46" and "12+34=?" in group.prompt_text and not group.regenerated


def test_of_the_last_token_the_experts_are_not_known(make_worker):
    gate = Gate()
    answer = gate.remote

    async def with_experts(request):
        rows = len(request.prompt_ids) + len(gate.ids) - 1
        return replace(await answer(request), experts=np.ones((rows, 3, 2), np.int16))

    gate.remote = with_experts
    group, = run(make_worker([gate]), [GroupRequest(0, 0, 0, 1, "train")])
    experts = group.trajectories[0].experts
    assert experts.shape == (len(group.trajectories[0].tokens), 3, 2) and experts.dtype == np.int16
    assert (experts[:-1] == 1).all() and (experts[-1] == -1).all()


def test_an_empty_completion_is_a_trajectory_of_its_prompt(make_worker):
    gate = Gate()
    gate.ids = []
    group, = run(make_worker([gate]), [GroupRequest(0, 0, 0, 1, "train")])
    assert group.trajectories[0].response_length == 0 and group.trajectories[0].reward == 0.0


def test_a_group_never_mixes_versions_and_counts_as_regenerated(make_worker):
    old, new = Gate(Version(0, 3)), Gate(Version(0, 4))  # one engine was restarted with newer weights
    groups = run(make_worker([old, new]), [GroupRequest(i, i, 0, 6, "train") for i in range(2)])
    for group in groups:
        assert {t.version for t in group.trajectories} in ({Version(0, 3)}, {Version(0, 4)})
        assert group.regenerated == (group.version != Version(0, 3))
    assert any(group.regenerated for group in groups)


def test_an_engine_that_missed_a_push_is_not_used(make_worker):
    stale, fresh = Gate(Version(0, 2)), Gate(Version(0, 3))
    group, = run(make_worker([stale, fresh]), [GroupRequest(0, 0, 0, 4, "train")])
    assert {t.version for t in group.trajectories} == {Version(0, 3)} and not group.regenerated


def test_a_lost_engine_is_counted_even_when_its_weights_come_back(make_worker):
    gate, lost = Gate(), []

    def die_once(request):
        if not lost:
            lost.append(request)
            raise EngineLost("died")
    gate.before = die_once
    group, = run(make_worker([gate]), [GroupRequest(0, 0, 0, 3, "train")])
    assert group.regenerated and group.version == Version(0, 3) and len(group.trajectories) == 3


def test_dropped_requests_are_aborted_and_the_others_finished(make_worker, monkeypatch):
    aborted, held = [], []
    monkeypatch.setattr("ray.cancel", aborted.append)

    class Holding(Gate):
        async def remote(self, request):
            if request.prompt_ids == held:
                await asyncio.Event().wait()
            return await super().remote(request)

    async def check():
        worker = make_worker([Holding()])
        await worker.prepare(("train",))
        held[:] = worker.sources[""].prompts[0]
        running, finished, wanted = (GroupRequest(i, row, 0, 2, "train") for i, row in enumerate((0, 1, 1)))
        await worker.ask([running, finished], Version(0, 3))
        while not worker.done:
            await asyncio.sleep(0.01)
        await worker.drop([running, finished])
        await worker.ask([wanted], Version(0, 3))
        assert [g.request for g in await worker.collect(300)] == [wanted] and not worker.tasks
        assert len(aborted) == 2 and worker.router.outstanding == [0]  # both samples of the one that was running
    asyncio.run(asyncio.wait_for(check(), 300))


def test_the_greedy_baseline_is_apart_from_the_samples(make_worker):
    gate = Gate()
    group, = run(make_worker([gate]), [GroupRequest(0, 0, 4, 2, "train", baseline=True)])
    assert [request.temperature for request in gate.requests] == [1.0, 1.0, 0.0]
    assert len(group.trajectories) == 2 and group.baseline_reward == 1.0
    plain, = run(make_worker([Gate()]), [GroupRequest(0, 0, 4, 2, "train")])
    assert plain.baseline is None and plain.baseline_reward is None


def test_a_long_training_response_loses_some_of_its_reward(make_worker, tmp_path):
    sections = {"reward": {"kind": "exact", "overlong": {"buffer_tokens": 4, "penalty": 0.5}},
                "rollout": {"sampling": {"max_response_tokens": 5}},
                "eval": {"datasets": {"heldout": {"path": str(tmp_path / "train.jsonl")}}}}
    requests = [GroupRequest(0, 0, 0, 1, "train", baseline=True), GroupRequest(1, 0, 0, 1, "eval", "heldout")]
    group, heldout = run(make_worker([Gate()], **sections), requests, kinds=("train", "eval"))
    t, = group.trajectories  # 3 tokens, 2 of the 4 before the limit
    assert (t.reward, t.overlong_penalty, t.shaped_reward, group.baseline_reward) == (1.0, -0.25, 0.75, 0.75)
    assert heldout.trajectories[0].overlong_penalty == 0.0


def test_cancel_forgets_what_was_asked(make_worker):
    gate = Gate()
    worker = make_worker([gate])

    async def check():
        await worker.prepare(("train",))
        gate.version = Version(0, 0)  # closed for everything that is asked
        await worker.ask([GroupRequest(0, 0, 0, 2, "train")], Version(0, 3))
        await asyncio.sleep(0.05)
        await worker.cancel()
        assert not worker.tasks and await worker.collect(0.05) == []
    asyncio.run(check())


def test_a_broken_rollout_is_reported_not_lost(make_worker):
    gate = Gate()
    gate.before = lambda request: (_ for _ in ()).throw(ValueError("bug"))
    with pytest.raises(RuntimeError, match="a rollout failed: ValueError"):
        run(make_worker([gate]), [GroupRequest(0, 0, 0, 2, "train")])


@pytest.mark.parametrize("sections, error, words", [
    ({"data": {"train": "{train}", "max_prompt_tokens": 3}}, DataError, "row 0.*max_prompt_tokens"),
    ({"reward": {"kind": "math"}, "data": {"train": "{train}", "answer_key": "nothing"}}, RewardError, "row 0")])
def test_bad_prompts_and_answers_are_named_by_row(make_worker, tmp_path, sections, error, words):
    train = tmp_path / "bad.jsonl"
    train.write_text(json.dumps({"prompt": "what?", "answer": "?", "nothing": ""}) + "\n")
    sections["data"]["train"] = str(train)
    worker = make_worker([Gate()], **sections)
    with pytest.raises(error, match=words):
        asyncio.run(worker.prepare(("train",)))


def test_held_out_sets_have_prompts_sampling_rewards_and_subsets_of_their_own(make_worker, tmp_path):
    rows = [{"question": "1+1=?", "gold": "2", "level": 3}, {"question": "12+34=?", "gold": "46", "level": 1},
            {"question": "2+2=?", "gold": "4", "level": 1}]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    datasets = {
        "as_training": {"path": str(tmp_path / "train.jsonl")},
        "own": {"path": str(tmp_path / "own.jsonl"), "max_prompts": 2, "prompt_key": "question", "answer_key": "gold",
                "subset_key": "level", "reward": {"kind": "math"},
                "sampling": {"temperature": 0.0, "top_p": 0.9, "top_k": 5, "max_response_tokens": 7}}}
    gate = Gate()
    worker = make_worker([gate], eval={"datasets": datasets}, rollout={"sampling": {"max_response_tokens": 32}})
    first, second = run(worker, [GroupRequest(0, 0, 4, 1, "eval", "as_training"),
                                 GroupRequest(1, 1, 4, 1, "eval", "own")], kinds=("eval",))
    assert asyncio.run(worker.sizes()) == {"": 0, "as_training": 2, "own": 2}
    assert (first.answer, first.subset, second.answer, second.subset) == ("46", "", "46", "1")
    assert first.prompt_text == second.prompt_text and second.trajectories[0].extracted == "46"
    one, other = sorted(gate.requests, key=lambda request: -request.temperature)
    assert (one.temperature, one.top_p, one.top_k, one.max_tokens) == (1.0, 1.0, -1, 32)
    assert (other.temperature, other.top_p, other.top_k, other.max_tokens) == (0.0, 0.9, 5, 7)
    assert (one.seed, other.seed) == (request_seed(1, 4, "as_training/0", 0), request_seed(1, 4, "own/1", 0))


def test_a_held_out_row_without_a_subset_is_named(make_worker, tmp_path):
    worker = make_worker([Gate()], eval={"datasets": {"own": {"path": str(tmp_path / "train.jsonl"),
                                                              "subset_key": "level"}}})
    with pytest.raises(DataError, match=r"line 1: column 'level' \(subset_key\) is missing"):
        asyncio.run(worker.prepare(("eval",)))


class TeacherGate:
    """Answers score with minus the token's place; closed at first."""

    def __init__(self):
        self.asked, self.score = [], self

    async def remote(self, token_ids):
        self.asked.append(token_ids)
        if len(self.asked) == 1:
            raise EngineLost("died")
        return [-float(place) for place in range(len(token_ids))]


def test_a_teacher_scores_the_sampled_tokens_of_training_prompts_alone(make_worker, model, tmp_path):
    gate, teacher = Gate(), TeacherGate()
    sections = {"teacher": {"path": str(model), "python": "python"}, "algorithm": {"name": "distill"},
                "eval": {"datasets": {"heldout": {"path": str(tmp_path / "train.jsonl")}}}}
    worker = make_worker([gate], lambda: [teacher], **sections)
    heldout, trained = run(worker, [GroupRequest(0, 0, 0, 1, "eval", "heldout"), GroupRequest(1, 0, 0, 2, "train")],
                           kinds=("train", "eval"))
    assert heldout.trajectories[0].teacher_log_prob is None and heldout.taught is None
    assert trained.finished <= trained.taught[0] <= trained.taught[1]
    assert len(teacher.asked) == 3 and not trained.regenerated  # lost and asked again; the sample is still its own
    for t in trained.trajectories:
        assert t.tokens.tolist() in teacher.asked and t.teacher_log_prob.dtype == np.float32
        expected = [-float(place) if sampled else 0.0 for place, sampled in enumerate(t.loss_mask)]
        assert t.teacher_log_prob.tolist() == expected


@pytest.mark.parametrize("key, section", [
    ("teacher.path", lambda path: {"teacher": {"path": path, "python": "python"}}),
    ("algorithm.critic.path", lambda path: {"algorithm": {"name": "gae", "critic": {"path": path}}})])
def test_a_teacher_or_critic_with_other_tokens_is_refused(make_worker, model, tmp_path, key, section):
    other = tmp_path / "other"
    shutil.copytree(model, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second, *_ = (token for token in vocab if token.isalnum())
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    worker = make_worker([Gate()], **section(str(other)))
    with pytest.raises(DataError, match=f"{key} {other} has another tokenizer than the model: 2 tokens"):
        asyncio.run(worker.prepare(("train",)))


def test_a_critic_may_have_fewer_unused_rows_but_must_embed_every_token(make_worker, model, tmp_path):
    other = tmp_path / "critic"
    shutil.copytree(model, other)
    config = json.loads((other / "config.json").read_text())
    known = max(make_tokenizer().get_vocab().values()) + 1
    worker = make_worker([Gate()], algorithm={"name": "gae", "critic": {"path": str(other)}})
    for rows in (known, known - 1):
        (other / "config.json").write_text(json.dumps({**config, "vocab_size": rows}))
        if rows == known:
            asyncio.run(worker.prepare(("train",)))
    with pytest.raises(DataError, match=f"algorithm.critic.path {other} has {known - 1} embedding rows, fewer than"):
        asyncio.run(worker.prepare(("train",)))


def test_every_part_of_the_reward_is_kept_and_a_fault_names_its_sample(make_worker, tmp_path, caplog):
    (tmp_path / "f.py").write_text("def broken(prompt, response, answer):\n    raise KeyError('lost')\n")
    parts = {"right": {"kind": "exact", "weight": 2.0},
             "short": {"kind": "length", "full": 1, "zero": 5, "weight": 0.5},
             "broken": {"kind": "custom", "function": f"{tmp_path}/f.py:broken"}}
    group, = run(make_worker([Gate()], reward={"parts": parts}), [GroupRequest(7, 0, 4, 2, "train")])
    for t in group.trajectories:
        assert t.reward_parts == {"right": 1.0, "short": 0.5, "broken": 0.0}  # three tokens
        assert t.reward == 2.25 and t.reward_error == "broken: error: KeyError: 'lost'"
    assert "sample 1 of train group 7 (row 0): broken: error: KeyError" in caplog.text
