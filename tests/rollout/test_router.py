"""The router against stand-ins for engine gates: which engine gets a request, and what happens when one is lost."""
import asyncio

import pytest

from mrl.engine.api import Completion, EngineClosed, EngineLost, GenerateRequest, Version
from mrl.rollout.router import Router


class Gate:
    """Behaves like an actor handle: `gate.generate.remote(request)` is awaitable."""

    def __init__(self, outcomes=(), delay=0.01):
        self.outcomes, self.delay, self.served = list(outcomes), delay, 0
        self.generate = self

    async def remote(self, request):
        self.served += 1
        await asyncio.sleep(self.delay)
        if self.outcomes and (outcome := self.outcomes.pop(0)):
            raise outcome
        return Completion([1], [0.0], "stop", Version(0, 0))


def request(tokens=10):
    return GenerateRequest([1], seed=0, max_tokens=tokens, temperature=1.0)


def test_a_long_request_keeps_others_away():
    async def run():
        gates = [Gate(delay=0.2), Gate(delay=0.01)]
        router = Router(gates, deadline_s=300)
        await asyncio.gather(router.generate(request(1000)), *(router.generate(request(10)) for _ in range(6)))
        return gates
    gates = asyncio.run(run())
    assert [gate.served for gate in gates] == [1, 6]


@pytest.mark.parametrize("error", [EngineLost("died"), EngineClosed("dirty")])
def test_a_lost_request_is_asked_again(error):
    async def run(gates):
        router = Router(gates, deadline_s=300, retry_s=0.05)
        return await router.generate(request()), router
    routed, router = asyncio.run(run([Gate([error, error])]))
    assert routed.completion.token_ids == [1] and router.outstanding == [0]
    assert routed.losses == (2 if isinstance(error, EngineLost) else 0)
    other = Gate()
    asyncio.run(run([Gate([error]), other]))
    assert other.served == 1


def test_the_deadline_ends_the_wait():
    router = Router([Gate([EngineClosed("dirty")] * 100)], deadline_s=0.3, retry_s=0.05)
    with pytest.raises(TimeoutError, match="collect_timeout_s"):
        asyncio.run(router.generate(request()))


def test_other_errors_are_not_swallowed():
    with pytest.raises(KeyError):
        asyncio.run(Router([Gate([KeyError("bug")])], deadline_s=1).generate(request()))
