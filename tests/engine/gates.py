"""For tests of the gate: a server made of futures, and what is asked of an engine that has one."""
import asyncio
from dataclasses import replace

from mrl.engine.api import EngineLost, EngineStartError, GenerateRequest
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
    answers_while_sampling = True

    def __init__(self, experiment, index, run_id, incarnation, log_path, gpus, load_weights):
        self.answers = {"mrl_prepare": [self.ok(not_sharded={}, proven=True)],
                        "mrl_prove": [self.ok(not_sharded={})], "mrl_receive": [self.ok(expected=sent(42))],
                        "mrl_forget": [{"error": None}]}
        self.calls, self.waiting, self.code, self.resets, self.stopped = [], [], None, 0, False
        self.memory: list[str] = []  # calls of sleep and wake
        FakeServer.made.append(self)

    def lose(self):
        """Go away under the requests; that the process has died shows later."""
        for future in self.waiting:
            future.set_exception(EngineLost("gone"))

    @staticmethod
    def ok(**extra):
        return {"error": None, "holdings": WHOLE, "opaque": {}, "receive_s": 0.1, "apply_s": 0.2, "transfer_s": 0.25,
                **extra}

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

    async def score(self, token_ids):
        return await self.generate(token_ids)

    async def call_workers(self, method, argument=None, timeout_s=60.0):
        self.calls.append(method)
        answer = self.answers[method]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def sleep(self, timeout_s):
        self.memory.append("sleep")

    async def wake(self, part, timeout_s):
        self.memory.append(part)

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
        self.waiting.pop(0).set_result(([7], [-0.5], "stop", None))


def sync_request(step: int, **changes) -> SyncRequest:
    request = SyncRequest(run_id="run", engine=0, incarnation=1, version=(0, step), push=step, link="l",
                          connect=True, store_host="h", store_port=1, plan=PLAN, buffers=2, transport="gloo",
                          verify=True, deadline_s=100.0)
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

    asyncio.run(asyncio.wait_for(main(), 300))


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


async def settle():
    """Let every task run on until it waits for something that a test decides: servers here need no time."""
    for _ in range(50):
        await asyncio.sleep(0)


async def sampling(engine, server):
    """A request that has reached the server."""
    count = len(server.waiting)
    task = asyncio.create_task(engine.generate(REQUEST))
    await until(lambda: len(server.waiting) > count or task.done())
    return task
