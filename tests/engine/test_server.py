"""The gate, over a server made of futures: what it lets through, when, and with which version."""
import asyncio
import time
from dataclasses import replace

import pytest

from mrl.engine import server as module
from mrl.engine.api import EngineClosed, EngineLost, EngineStartError, GenerateRequest, SyncError, Version
from mrl.engine.server import EngineServer
from mrl.receiver.mrl_receiver.wire import SyncRequest
from tests.receiver.toy import wire_plan
from tests.rollout.experiments import experiment

REQUEST = GenerateRequest([1, 2], seed=0, max_tokens=8, temperature=1.0)
PLAN = wire_plan(buckets=(("norm",),))
WHOLE = {"norm": [[0, [6], [1], 42]]}


def sent(checksum: int) -> dict:
    return {"shared": {"norm": checksum}, "direct": {}}


class FakeServer:
    """Answers generate when the test says so; workers answer what the test has put in `answers`."""

    made: list = []
    start_failures = 0

    def __init__(self, experiment, index, run_id, incarnation, log_path, gpus, load_weights):
        self.answers = {"mrl_prepare": [self.ok(not_sharded={}, proven=True)],
                        "mrl_prove": [self.ok(not_sharded={})], "mrl_receive": [self.ok(expected=sent(42))]}
        self.calls, self.waiting, self.code, self.resets, self.stopped = [], [], None, 0, False
        FakeServer.made.append(self)

    def lose(self):
        """Go away under the requests; that the process has died shows later."""
        for future in self.waiting:
            future.set_exception(EngineLost("gone"))

    @staticmethod
    def ok(**extra):
        return {"error": None, "holdings": WHOLE, "opaque": {}, "receive_s": 0.1, "apply_s": 0.2, **extra}

    async def start(self):
        if FakeServer.start_failures:
            FakeServer.start_failures -= 1
            raise EngineStartError("it would not start")

    async def generate(self, request):
        if self.stopped:
            raise EngineLost("gone")
        future = asyncio.get_running_loop().create_future()
        self.waiting.append(future)
        return await future

    async def call_workers(self, method, argument=None, timeout_s=60.0):
        self.calls.append(method)
        answer = self.answers[method]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def reset_prefix_cache(self, timeout_s):
        self.resets += 1

    def exit_code(self):
        return self.code

    def log_tail(self):
        return "last words"

    async def stop(self):
        self.stopped = True
        for future in self.waiting:
            if not future.done():
                future.set_exception(EngineLost("gone"))

    def answer(self):
        self.waiting.pop(0).set_result(([7], [-0.5], "stop"))


@pytest.fixture(autouse=True)
def _short_backoff(monkeypatch):
    monkeypatch.setattr(module, "FIRST_BACKOFF_S", 0.01)


def sync_request(step: int, **changes) -> SyncRequest:
    request = SyncRequest(run_id="run", engine=0, incarnation=1, version=(0, step), push=step, link="l",
                          connect=True, store_host="h", store_port=1, plan=PLAN, buffers=2, transport="gloo",
                          verify=True, deadline_s=5.0)
    return replace(request, **changes)


async def push(engine, step: int, /, **changes):
    """As rank 0 does it over a new link."""
    request = sync_request(step, **changes)
    prepared = await engine.prepare(request)
    assert prepared.not_sharded == {}
    return await engine.receive(replace(request, plan={}))


def with_engine(scenario, load_weights=False, **rollout):
    """Run scenario(engine, fake server) on a started engine."""
    async def main():
        FakeServer.made, FakeServer.start_failures = [], 0
        config = experiment(rollout={"python": "py", **rollout})
        engine = EngineServer(config, 0, "run", "/nowhere", load_weights=load_weights, make_server=FakeServer)
        await engine.start()
        try:
            await scenario(engine, FakeServer.made[0])
        finally:
            await engine.stop()

    asyncio.run(asyncio.wait_for(main(), 30))


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


async def sampling(engine, server):
    """A request that has reached the server."""
    count = len(server.waiting)
    task = asyncio.create_task(engine.generate(REQUEST))
    await until(lambda: len(server.waiting) > count or task.done())
    return task


def test_nothing_is_generated_before_the_first_sync_and_versions_are_stamped():
    async def scenario(engine, server):
        with pytest.raises(EngineClosed, match="dirty: it has not received any weights"):
            await engine.generate(REQUEST)
        result = await push(engine, 3)
        assert result.verified and server.resets == 1
        status = await engine.status()
        assert (status.state, status.version) == ("serving", Version(0, 3))
        task = await sampling(engine, server)
        assert (await engine.status()).outstanding_tokens == 8
        server.answer()
        completion = await task
        assert (completion.version, completion.token_ids) == (Version(0, 3), [7])
        assert (await engine.status()).outstanding_tokens == 0

    with_engine(scenario)


def test_a_sync_waits_for_requests_in_flight_and_lets_no_new_one_in():
    async def scenario(engine, server):
        await push(engine, 1)
        task = await sampling(engine, server)
        sync = asyncio.create_task(push(engine, 2))
        await asyncio.sleep(0.05)
        with pytest.raises(EngineClosed, match="receiving version 0:2"):
            await engine.generate(REQUEST)
        assert not sync.done() and server.calls.count("mrl_receive") == 1
        server.answer()
        assert (await task).version == Version(0, 1)
        await sync
        assert (await engine.status()).version == Version(0, 2)

    with_engine(scenario)


def test_requests_that_queue_for_a_slot_do_not_slip_through_a_closed_gate():
    async def scenario(engine, server):
        await push(engine, 1)
        first = await sampling(engine, server)
        second = asyncio.create_task(engine.generate(REQUEST))
        await asyncio.sleep(0.02)
        assert len(server.waiting) == 1, "rollout.max_concurrent_requests was exceeded"
        server.answers["mrl_receive"] = [{"error": "torn"}]
        sync = asyncio.create_task(push(engine, 2))
        await asyncio.sleep(0.02)
        server.answer()
        await first
        with pytest.raises(EngineClosed):
            await second
        with pytest.raises(SyncError):
            await sync

    with_engine(scenario, max_concurrent_requests=1)


def test_a_drain_that_takes_too_long_refuses_the_sync_and_serves_on():
    async def scenario(engine, server):
        await push(engine, 1)
        task = await sampling(engine, server)
        with pytest.raises(SyncError, match="1 requests were still in flight"):
            await push(engine, 2, deadline_s=0.05)
        server.answer()
        assert (await task).version == Version(0, 1)
        assert (await engine.status()).state == "serving"

    with_engine(scenario)


@pytest.mark.parametrize("changes, words", [
    ({"version": (0, 4)}, "0:4 is refused.*serves 0:5"), ({"version": (0, 5)}, "0:5 is refused.*serves 0:5"),
    ({"run_id": "other"}, "of run 'run', not engine 0 of run 'other'"), ({"engine": 1}, "not engine 1"),
])
def test_refusals_leave_it_serving(changes, words):
    async def scenario(engine, server):
        await push(engine, 5)
        with pytest.raises(SyncError, match=words):
            await push(engine, 6, **changes)
        assert (await engine.status()).version == Version(0, 5)
        await push(engine, 0, version=(1, 0))  # a later attempt is newer

    with_engine(scenario)


@pytest.mark.parametrize("answer, words", [
    ([{"error": "LinkError: closed"}], "worker 0: LinkError: closed"),
    (RuntimeError("500"), "500"),
    ([FakeServer.ok(expected=sent(41))], "verification failed: norm: the engine's checksum 42 is not .* 41"),
])
def test_a_broken_sync_leaves_it_dirty_until_a_whole_one(answer, words):
    async def scenario(engine, server):
        await push(engine, 1)
        server.answers["mrl_receive"] = answer
        with pytest.raises(SyncError, match=words):
            await push(engine, 2)
        assert (await engine.status()).state == "dirty"
        with pytest.raises(EngineClosed, match="version 0:2 was not received whole"):
            await engine.generate(REQUEST)
        with pytest.raises(SyncError, match="0:1 is refused.*was promised 0:2"):
            await push(engine, 1)
        server.answers["mrl_receive"] = [FakeServer.ok(expected=sent(42))]
        await push(engine, 2)  # the same version, which it has not committed
        assert (await engine.status()).version == Version(0, 2)

    with_engine(scenario)


@pytest.mark.parametrize("answer, words", [
    ([{"error": "TraceError: norm"}], "worker 0: TraceError: norm"),
    ([{**FakeServer.ok(), "holdings": {}}], "norm of shape .* takes 0 of its 6 elements"),
    (RuntimeError("answered 500"), "RuntimeError: answered 500"),
])
def test_a_plan_that_does_not_fit_is_refused_before_any_byte(answer, words):
    async def scenario(engine, server):
        await push(engine, 1)
        server.answers["mrl_prepare"] = answer
        with pytest.raises(SyncError, match=words):
            await push(engine, 2)
        assert server.calls.count("mrl_receive") == 1
        assert (await engine.status()).version == Version(0, 1)

    with_engine(scenario)


@pytest.mark.parametrize("wire, words", [
    ({}, "malformed: KeyError 'tensors'"), ({**PLAN, "node": 2}, "malformed: ValueError 1 workers"),
])
def test_a_malformed_plan_and_a_sync_without_one_are_refused(wire, words):
    async def scenario(engine, server):
        with pytest.raises(SyncError, match="given no plan"):
            await engine.receive(sync_request(1))
        with pytest.raises(SyncError, match=words):
            await engine.prepare(sync_request(1, plan=wire))
        assert not server.calls
        with pytest.raises(EngineClosed, match="dirty: version 0:1 was refused: the plan is malformed"):
            await engine.generate(REQUEST)

    with_engine(scenario)


def test_a_plan_is_traced_while_requests_run_and_shards_are_proven_when_they_are_done():
    async def scenario(engine, server):
        await push(engine, 1)
        task = await sampling(engine, server)
        assert (await engine.prepare(sync_request(2))).not_sharded == {}
        assert (await engine.status()).version == Version(0, 1)
        server.answers["mrl_prepare"] = [FakeServer.ok(not_sharded={"norm": "worker 0: it is elsewhere"}, proven=False)]
        assert (await engine.prepare(sync_request(2))).not_sharded == {"norm": "worker 0: it is elsewhere"}
        assert "mrl_prove" not in server.calls and (await engine.status()).version == Version(0, 1)
        server.answers["mrl_prepare"] = [FakeServer.ok(not_sharded={}, proven=False)]
        server.answers["mrl_prove"] = [FakeServer.ok(not_sharded={"norm": "it would differ"})]
        proof = asyncio.create_task(engine.prepare(sync_request(2)))
        await asyncio.sleep(0.05)
        assert "mrl_prove" not in server.calls
        server.answer()
        assert (await task).version == Version(0, 1)
        assert (await proof).not_sharded == {"norm": "it would differ"}
        assert (await engine.status()).state == "dirty"
        with pytest.raises(EngineClosed, match="dirty: it is receiving version 0:2"):
            await engine.generate(REQUEST)
        server.answers["mrl_prepare"] = [FakeServer.ok(not_sharded={}, proven=True)]
        await push(engine, 2)
        assert (await engine.status()).version == Version(0, 2)

    with_engine(scenario)


def test_a_proof_that_breaks_off_leaves_it_dirty():
    async def scenario(engine, server):
        await push(engine, 1)
        server.answers["mrl_prepare"] = [FakeServer.ok(not_sharded={}, proven=False)]
        server.answers["mrl_prove"] = [{"error": "OutOfMemoryError"}]
        with pytest.raises(SyncError, match="worker 0: OutOfMemoryError"):
            await engine.prepare(sync_request(2))
        assert (await engine.status()).state == "dirty"

    with_engine(scenario)


def test_death_loses_requests_and_restarts_dirty_until_the_limit():
    async def scenario(engine, server):
        await push(engine, 1)
        task = await sampling(engine, server)
        server.code = 137
        with pytest.raises(EngineLost):
            await task
        await until(lambda: len(FakeServer.made) == 2 and engine._state == "dirty")
        assert (await engine.status()).incarnation == 2
        with pytest.raises(EngineLost, match="the sync is for incarnation 1"):
            await push(engine, 2)
        await push(engine, 1, incarnation=2)  # it lost version 1, so 1 is welcome
        FakeServer.start_failures = 9
        FakeServer.made[1].code = 1
        await until(lambda: engine._state == "failed")
        assert len(FakeServer.made) == 3
        with pytest.raises(EngineLost, match="rollout.max_restarts=2 used up; it would not start"):
            await engine.generate(REQUEST)

    with_engine(scenario, max_restarts=2)


def test_a_server_that_goes_away_closes_the_gate_at_once():
    async def scenario(engine, server):
        await push(engine, 1)
        task = await sampling(engine, server)
        server.lose()
        with pytest.raises(EngineLost):
            await task
        assert (await engine.status()).state == "starting"
        with pytest.raises(EngineLost, match="is starting"):
            await push(engine, 2)
        await until(lambda: engine._state == "dirty")
        assert (await engine.status()).incarnation == 2

    with_engine(scenario)


def test_the_end_of_the_log_is_in_the_error():
    async def scenario(engine, server):
        server.code = 9
        await until(lambda: engine._state == "failed")
        assert "exit code 9" in (await engine.status()).error and "last words" in (await engine.status()).error

    with_engine(scenario, max_restarts=0)


def test_aborted_requests_never_look_finished():
    async def scenario(engine, server):
        await push(engine, 7)
        task = await sampling(engine, server)
        assert await engine.abort(attempt=1) == 1
        with pytest.raises(EngineClosed, match="aborted half way"):
            await task
        assert (await engine.status()).outstanding_tokens == 0
        with pytest.raises(SyncError, match="0:8 is refused"):
            await push(engine, 8)
        await push(engine, 0, version=(1, 0))

    with_engine(scenario)


def test_abort_reaches_the_requests_that_wait_for_a_slot_and_no_later_ones():
    async def scenario(engine, server):
        await push(engine, 7)
        first = await sampling(engine, server)
        waiting = [asyncio.create_task(engine.generate(REQUEST)) for _ in range(3)]
        await asyncio.sleep(0.02)
        assert await engine.abort(attempt=0) == 4
        later = asyncio.create_task(engine.generate(REQUEST))
        for task in [first, *waiting]:
            with pytest.raises(EngineClosed, match="aborted"):
                await task
        await until(lambda: len(server.waiting) == 2)
        server.waiting[1].set_result(([7], [-0.5], "stop"))
        assert (await later).token_ids == [7]
        assert len(server.waiting) == 2, "an aborted request has reached the server"
        assert (await engine.status()).outstanding_tokens == 0

    with_engine(scenario, max_concurrent_requests=1)


def test_weights_older_than_a_request_wants_do_not_answer_it():
    async def scenario(engine, server):
        await push(engine, 3)
        for wanted in (Version(0, 4), Version(1, 0)):
            with pytest.raises(EngineClosed, match=f"serves version 0:3, and {wanted} is wanted"):
                await engine.generate(replace(REQUEST, at_least=wanted))
        assert not server.waiting
        for wanted in (Version(0, 2), Version(0, 3)):
            task = asyncio.create_task(engine.generate(replace(REQUEST, at_least=wanted)))
            await until(lambda: server.waiting)
            server.answer()
            assert (await task).version == Version(0, 3)

    with_engine(scenario)


def test_a_request_without_an_answer_is_lost_and_the_engine_restarted():
    async def scenario(engine, server):
        await push(engine, 1)
        with pytest.raises(EngineLost, match="rollout.request_timeout_s=0.05"):
            await engine.generate(REQUEST)
        assert (await engine.status()).state == "starting"
        with pytest.raises(EngineClosed, match="is starting: .* did not answer a request"):
            await engine.generate(REQUEST)
        await until(lambda: engine._state == "dirty")
        assert server.stopped and (await engine.status()).incarnation == 2
        await push(engine, 1, incarnation=2)

    with_engine(scenario, request_timeout_s=0.05)


@pytest.mark.parametrize("method", ["mrl_prepare", "mrl_prove", "mrl_receive"])
def test_workers_that_do_not_answer_get_the_engine_restarted(method):
    async def scenario(engine, server):
        await push(engine, 1)
        server.answers["mrl_prepare"] = [FakeServer.ok(not_sharded={}, proven=False)]
        server.answers[method] = TimeoutError()
        with pytest.raises(EngineLost, match=f"did not answer {method} by the sync's deadline"):
            await push(engine, 2)
        assert (await engine.status()).state == "starting"
        await until(lambda: engine._state == "dirty")
        assert server.stopped and (await engine.status()).incarnation == 2

    with_engine(scenario)


def test_restarts_are_further_and_further_apart(monkeypatch):
    monkeypatch.setattr(module, "FIRST_BACKOFF_S", 0.1)
    monkeypatch.setattr(module, "MAX_BACKOFF_S", 0.3)
    made = []
    make = FakeServer.__init__
    monkeypatch.setattr(FakeServer, "__init__", lambda *a, **k: (made.append(time.monotonic()), make(*a, **k))[1])

    async def scenario(engine, server):
        FakeServer.start_failures = 9
        server.code, made[0] = 1, time.monotonic()
        await until(lambda: engine._state == "failed")
        gaps = [later - sooner for sooner, later in zip(made, made[1:])]
        assert len(gaps) == 3
        for gap, pause in zip(gaps, (0.1, 0.2, 0.3)):
            assert pause <= gap

    with_engine(scenario, max_restarts=3)


def test_loaded_weights_are_served_at_once():
    async def scenario(engine, server):
        task = await sampling(engine, server)
        server.answer()
        assert (await task).version == Version(0, 0)

    with_engine(scenario, load_weights=True)


def test_a_failed_start_is_raised():
    async def main():
        FakeServer.start_failures = 1
        engine = EngineServer(experiment(), 0, "run", "/nowhere", make_server=FakeServer)
        with pytest.raises(EngineStartError, match="would not start"):
            await engine.start()
        assert (await engine.status()).state == "failed"

    asyncio.run(main())
