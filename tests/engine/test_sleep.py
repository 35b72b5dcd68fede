"""The gate of an engine that shares its GPU, over a server made of futures: what it holds when, and what it refuses."""
import asyncio

import pytest

from mrl.engine.api import EngineClosed, EngineLost, SyncError, Version
from mrl.engine.server import EngineServer
from tests.engine.gates import FakeServer, REQUEST, push, sampling, settle, sync_request, until
from tests.rollout.experiments import experiment


def with_sleeper(scenario, **rollout):
    """Run scenario(engine, fake server) on a started engine that sleeps."""
    async def main():
        FakeServer.made, FakeServer.start_failures = [], 0
        config = experiment(rollout=rollout, loop={"mode": "colocated_sync"},
                            cluster={"device": "cuda", "gpus": 1, "trainer_gpus": None, "rollout_gpus": None})
        engine = EngineServer(config, 0, "run", "/nowhere", gpus=(0,), make_server=FakeServer)
        status = await engine.start()
        assert (status.state, status.version) == ("asleep", None)
        try:
            await scenario(engine, FakeServer.made[0])
        finally:
            await engine.stop()

    asyncio.run(asyncio.wait_for(main(), 30))


async def serve(engine, step, **changes):
    """A whole push point, as rank 0 has it."""
    await engine.wake("weights")
    await push(engine, step, **changes)
    await engine.wake("kv_cache")
    assert (await engine.status()).state == "serving"


def test_it_sleeps_from_its_start_and_opens_when_weights_and_cache_are_back():
    async def scenario(engine, server):
        assert (server.memory, server.calls, server.resets) == (["sleep"], ["mrl_forget"], 1)
        with pytest.raises(EngineClosed, match="is asleep: it sleeps since its start"):
            await engine.generate(REQUEST)
        for call in (engine.prepare, engine.receive):
            with pytest.raises(SyncError, match="its weights have no memory, and must be woken first"):
                await call(sync_request(1))
        await engine.wake("weights")
        await push(engine, 1)
        status = await engine.status()
        assert (status.state, status.version) == ("asleep", Version(0, 1))
        with pytest.raises(EngineClosed, match="is asleep: its cache sleeps"):
            await engine.generate(REQUEST)
        await engine.wake("kv_cache")
        task = await sampling(engine, server)
        server.answer()
        assert (await task).version == Version(0, 1)
        assert server.memory == ["sleep", "weights", "kv_cache"]

    with_sleeper(scenario)


def test_going_to_sleep_aborts_requests_and_forgets_the_weights():
    async def scenario(engine, server):
        await serve(engine, 1)
        first = await sampling(engine, server)
        second = asyncio.create_task(engine.generate(REQUEST))  # waits for a slot
        await settle()
        await engine.sleep()
        for task in (first, second):
            with pytest.raises(EngineClosed):
                await task
        await engine.sleep()  # nothing is left to do
        assert server.memory == ["sleep", "weights", "kv_cache", "sleep"] and server.calls[-1] == "mrl_forget"
        with pytest.raises(EngineClosed, match="the trainers are using its memory"):
            await engine.generate(REQUEST)
        status = await engine.status()
        assert (status.state, status.version) == ("asleep", None)
        await serve(engine, 1)  # it lost version 1, so 1 is welcome

    with_sleeper(scenario, max_concurrent_requests=1)


def test_an_engine_whose_push_failed_stays_closed_and_sleeps_and_wakes_like_any_other():
    async def scenario(engine, server):
        await engine.wake("weights")
        server.answers["mrl_receive"], right = [{"error": "torn"}], server.answers["mrl_receive"]
        with pytest.raises(SyncError, match="torn"):
            await push(engine, 1)
        await engine.wake("kv_cache")
        assert (await engine.status()).state == "dirty"
        await engine.sleep()
        server.answers["mrl_receive"] = right
        await serve(engine, 1)

    with_sleeper(scenario)


def test_woken_without_a_push_it_is_dirty():
    async def scenario(engine, server):
        await engine.wake("weights")
        await engine.wake("kv_cache")
        with pytest.raises(EngineClosed, match="dirty: it has not received any weights since it slept"):
            await engine.generate(REQUEST)

    with_sleeper(scenario)


def test_between_weights_and_cache_it_sleeps_by_way_of_its_cache():
    async def scenario(engine, server):
        await engine.wake("weights")
        await engine.sleep()
        assert server.memory == ["sleep", "weights", "kv_cache", "sleep"]

    with_sleeper(scenario)


def test_one_that_dies_in_its_sleep_is_restarted_when_it_may_hold_all_memory():
    async def scenario(engine, server):
        server.code = 137
        await until(lambda: server.stopped)
        await engine.sleep()
        await engine.wake("weights")
        await asyncio.sleep(0.1)
        assert len(FakeServer.made) == 1
        with pytest.raises(EngineLost, match="is starting"):
            await push(engine, 1)
        await engine.wake("kv_cache")
        await until(lambda: engine._state == "asleep")
        status = await engine.status()
        assert (status.incarnation, FakeServer.made[1].memory) == (2, ["sleep"])
        await engine.sleep()  # as all do before it is pushed to
        await serve(engine, 1, incarnation=2)

    with_sleeper(scenario)


@pytest.mark.parametrize("failing", ["sleep", "wake"])
def test_one_that_cannot_give_up_memory_or_take_it_back_is_ended(failing):
    async def scenario(engine, server):
        await serve(engine, 1)

        async def refuse(*_):
            raise RuntimeError("out of memory")

        setattr(server, failing, refuse)
        await engine.sleep()
        if failing == "wake":
            await engine.wake("weights")
        await until(lambda: server.stopped)
        await engine.sleep()  # none of its memory is left
        assert len(FakeServer.made) == 1
        await engine.wake("kv_cache")
        await until(lambda: engine._state == "asleep")
        await engine.sleep()
        await serve(engine, 2, incarnation=2)

    with_sleeper(scenario)


def test_the_trainers_wait_for_one_that_is_starting(monkeypatch):
    async def scenario(engine, server):
        await serve(engine, 1)
        started = asyncio.Event()

        async def start(self):
            await started.wait()

        monkeypatch.setattr(FakeServer, "start", start)
        server.code = 1
        await until(lambda: len(FakeServer.made) == 2)
        sleeping = asyncio.create_task(engine.sleep())
        await asyncio.sleep(0.05)
        assert not sleeping.done()
        started.set()
        await sleeping
        assert (await engine.status()).state == "asleep" and FakeServer.made[1].memory == ["sleep"]

    with_sleeper(scenario)


def test_one_that_is_given_up_holds_nothing():
    async def scenario(engine, server):
        await serve(engine, 1)
        server.code = 1
        await until(lambda: engine._state == "failed")
        await engine.sleep()
        await engine.wake("weights")
        await engine.wake("kv_cache")
        assert (await engine.status()).state == "failed"

    with_sleeper(scenario, max_restarts=0)
