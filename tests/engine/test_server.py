"""The gate, over a server made of futures: what it lets through, when, with which version, and its server's life."""
import asyncio
import time
from dataclasses import replace

import pytest

from mrl.engine import life as module
from mrl.engine.api import EngineClosed, EngineLost, EngineStartError, SyncError, Version
from mrl.engine.server import EngineServer
from tests.engine.gates import FakeServer, REQUEST, push, sampling, settle, until, with_engine
from tests.rollout.experiments import experiment


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


def test_tokens_are_scored_through_the_same_gate():
    async def scenario(engine, server):
        with pytest.raises(EngineClosed, match="dirty"):
            await engine.score([5, 6])
        await push(engine, 1)
        task = asyncio.create_task(engine.score([5, 6]))
        await until(lambda: server.waiting)
        assert (await engine.status()).outstanding_tokens == 2
        server.waiting.pop().set_result([0.0, -1.5])
        assert await task == [0.0, -1.5]
        task = asyncio.create_task(engine.score([5, 6]))
        await until(lambda: server.waiting)
        server.lose()
        with pytest.raises(EngineLost):
            await task

    with_engine(scenario)


def test_requests_that_queue_for_a_slot_do_not_slip_through_a_closed_gate():
    async def scenario(engine, server):
        await push(engine, 1)
        first = await sampling(engine, server)
        second = asyncio.create_task(engine.generate(REQUEST))
        await settle()
        assert len(server.waiting) == 1, "rollout.max_concurrent_requests was exceeded"
        server.answers["mrl_receive"] = [{"error": "torn"}]
        sync = asyncio.create_task(push(engine, 2))
        await settle()
        server.answer()
        await first
        with pytest.raises(EngineClosed):
            await second
        with pytest.raises(SyncError):
            await sync

    with_engine(scenario, max_concurrent_requests=1)


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
        await settle()
        assert await engine.abort(attempt=0) == 4
        later = asyncio.create_task(engine.generate(REQUEST))
        for task in [first, *waiting]:
            with pytest.raises(EngineClosed, match="aborted"):
                await task
        await until(lambda: len(server.waiting) == 2)
        server.waiting[1].set_result(([7], [-0.5], "stop", None))
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
