"""What rank 0 remembers of the engines between pushes, over engines made of finished futures."""
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from mrl.engine.api import EngineChanged, EngineLost, EngineStatus, Prepared, SyncError, SyncResult, Version
from mrl.receiver.mrl_receiver.links import failed_key
from mrl.receiver.mrl_receiver.wire import SyncRequest, announced_key
from mrl.reshard import Layout
from mrl.stream.calls import EngineCalls
from mrl.stream.planning import plan_of
from tests.reshard.simulate import spec_of
from tests.rollout.experiments import experiment


class Engine:
    """Stands in for an actor's handle; `answers` maps methods to what they return, or raise."""

    def __init__(self):
        self.answers = {"status": EngineStatus(0, 1, "serving", Version(0, 0), 0, None, 1), "prepare": Prepared({}),
                        "receive": SyncResult(verified=True, drain_s=0.0, receive_s=0.0, apply_s=0.0, transfer_s=0.0)}

    def __getattr__(self, method: str):
        future: Future = Future()
        answer = self.answers[method]
        future.set_exception(answer) if isinstance(answer, Exception) else future.set_result(answer)
        return SimpleNamespace(remote=lambda *_: SimpleNamespace(future=lambda: future))


class Gang:
    """Rank 0's calls, and pushes one after the other."""

    def __init__(self):
        exp = experiment()
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.engine, self.plan = Engine(), plan_of(exp, spec_of("qwen3"), Layout(), te=False)
        self.calls = EngineCalls([self.engine], "run", exp.sync, "gloo", self.store, "127.0.0.1")
        self.number = 0

    def push(self, lost=()):
        """(request, round) of a push in which senders gave the engine up for the reasons `lost`."""
        self.number += 1
        push = self.calls.begin(self.number, Version(0, self.number), None, self.plan, exclude=pytest.fail)
        request = push.targets[0].request
        self.calls.start(push)
        self.calls.conclude(push, lambda _: list(lost), deadline=0.0)
        return request, push


@pytest.fixture
def gang():
    return Gang()


def test_a_link_lasts_and_the_engine_is_a_base_for_changes(gang):
    first, _ = gang.push()
    second, push = gang.push()
    assert first.connect and first.verify and first.base is None
    assert not second.connect and not second.verify and (second.link, second.base) == (first.link, 1)
    assert push.errors == {0: None}


def test_an_engine_that_slept_keeps_its_link_but_is_no_base(gang):
    first, _ = gang.push()
    gang.engine.answers["status"] = EngineStatus(0, 1, "asleep", None, 0, None, 1)
    second, _ = gang.push()
    assert not second.connect and second.link == first.link and second.base is None


def test_a_link_that_a_sender_gave_up_is_forgotten_even_if_the_engine_committed(gang):
    gang.push()
    second, push = gang.push(lost=["rank 3: the socket is closed"])
    assert push.errors == {0: None} and push.results[0].verified  # it serves the version
    third, _ = gang.push()
    assert third.connect and third.link != second.link and third.base is None
    assert not third.verify  # the engine is the same, and so is the plan


@pytest.mark.parametrize("lost, words", [((), "it died"), (["rank 3: no answer"], "it died; rank 3: no answer")])
def test_a_failed_push_forgets_the_link_and_says_everything(gang, lost, words):
    first, _ = gang.push()
    gang.engine.answers["receive"] = EngineLost("it died")
    second, push = gang.push(lost)
    assert (second.link, push.errors) == (first.link, {0: words})
    assert gang.store.check([failed_key(first.link)])  # senders that still wait hear of it
    third, _ = gang.push()
    assert third.connect and third.link != first.link and third.base is None


def test_a_new_incarnation_gets_a_new_link_and_is_verified(gang):
    first, _ = gang.push()
    gang.engine.answers["status"] = EngineStatus(0, 2, "dirty", None, 0, None, 1)
    second, _ = gang.push()
    assert second.connect and second.verify and second.link != first.link and second.incarnation == 2


def believing(gang):
    """(request, round) of a push that asks nothing first."""
    gang.number += 1
    push = gang.calls.believe(gang.number, Version(0, gang.number), None, gang.plan)
    gang.calls.start(push)
    gang.calls.conclude(push, lambda _: [], deadline=0.0)
    return push.targets[0].request, push


def test_engines_with_a_link_that_works_are_not_asked_and_the_push_is_announced(gang):
    assert gang.calls.believe(1, Version(0, 1), None, gang.plan) is None
    first, _ = gang.push()
    gang.engine.answers["status"] = RuntimeError("it was asked")
    request, push = believing(gang)
    assert (request.link, request.after, request.connect, push.errors) == (first.link, first.push, False, {0: None})
    assert SyncRequest.from_json(gang.store.get(announced_key(first.link, first.push)).decode()) == request
    following, _ = believing(gang)
    assert following.after == request.push


@pytest.mark.parametrize("error", [EngineChanged("incarnation 2"), RuntimeError("the actor has died")])
def test_an_engine_that_has_changed_is_to_be_asked_and_gets_a_new_link(gang, error):
    first, _ = gang.push()
    gang.engine.answers["receive"] = error
    _, push = believing(gang)
    assert push.again == [0] and not push.errors and gang.calls.believe(9, Version(0, 9), None, gang.plan) is None
    gang.engine.answers["receive"] = SyncResult(True, 0.0, 0.0, 0.0, 0.0)
    request, _ = gang.push()
    assert request.connect and request.link != first.link


@pytest.mark.parametrize("error", [EngineLost("it died"), SyncError("refused")])
def test_an_engine_that_fails_in_a_push_is_no_other_one(gang, error):
    gang.push()
    gang.engine.answers["receive"] = error
    _, push = believing(gang)
    assert push.errors == {0: str(error)} and not push.again


def test_what_changes_are_applied_to_is_asked_for(gang):
    gang.calls.settings = gang.calls.settings.model_copy(update={"delta": True})
    gang.push()
    assert gang.calls.believe(2, Version(0, 2), None, gang.plan) is None
