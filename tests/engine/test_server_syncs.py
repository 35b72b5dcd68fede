"""The gate in a sync, over a server made of futures: when it closes, what it refuses, and when it opens again."""
import asyncio

import pytest

from mrl.engine.api import EngineClosed, EngineLost, SyncError, Version
from tests.engine.gates import FakeServer, PLAN, REQUEST, push, sampling, sent, settle, sync_request, until, with_engine


def test_a_sync_waits_for_requests_in_flight_and_lets_no_new_one_in():
    async def scenario(engine, server):
        await push(engine, 1)
        task = await sampling(engine, server)
        sync = asyncio.create_task(push(engine, 2))
        await settle()
        with pytest.raises(EngineClosed, match="receiving version 0:2"):
            await engine.generate(REQUEST)
        assert not sync.done() and server.calls.count("mrl_receive") == 1
        server.answer()
        assert (await task).version == Version(0, 1)
        await sync
        assert (await engine.status()).version == Version(0, 2)

    with_engine(scenario)


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
        await settle()
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


def test_an_engine_whose_workers_answer_between_requests_traces_when_they_are_done_and_serves_on(monkeypatch):
    monkeypatch.setattr(FakeServer, "answers_while_sampling", False)

    async def scenario(engine, server):
        await push(engine, 1)
        task = await sampling(engine, server)
        with pytest.raises(SyncError, match="1 requests were still in flight"):
            await engine.prepare(sync_request(2, deadline_s=0.05))
        assert server.calls.count("mrl_prepare") == 1 and (await engine.status()).state == "serving"
        preparing = asyncio.create_task(engine.prepare(sync_request(2)))
        await asyncio.sleep(0.05)
        assert server.calls.count("mrl_prepare") == 1
        with pytest.raises(EngineClosed, match="receiving version 0:2"):
            await engine.generate(REQUEST)
        server.answer()
        assert (await task).version == Version(0, 1) and (await preparing).not_sharded == {}
        assert (await engine.status()).version == Version(0, 1)
        later = await sampling(engine, server)
        server.answer()
        assert (await later).version == Version(0, 1)
        server.answers["mrl_prepare"] = [{"error": "TraceError: norm"}]
        with pytest.raises(SyncError, match="TraceError"):
            await engine.prepare(sync_request(2))
        assert (await engine.status()).state == "serving"

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
