"""A discrete-event core for simulating transfers: a clock, things to wait for, and links that share their bandwidth.

A process is a generator. It yields seconds to pass, or an `Event` to wait for. Nothing here knows of weights or plans.
"""
from __future__ import annotations

import heapq
from collections import deque
from typing import Any, Callable, Generator, Iterable, Sequence

Process = Generator["float | Event", None, None]


class Deadlock(RuntimeError):
    """Nothing is left to happen, and some processes still wait."""


class Event:
    """Something that happens once; `fire` wakes whoever waits."""

    __slots__ = ("fired", "_calls")

    def __init__(self) -> None:
        self.fired = False
        self._calls: list[Callable[[], None]] = []

    def then(self, call: Callable[[], None]) -> None:
        """Run `call` when it happens; at once if it has."""
        if self.fired:
            call()
        else:
            self._calls.append(call)

    def fire(self) -> None:
        self.fired = True
        for call in self._calls:
            call()
        self._calls = []


class Clock:
    """Simulated time in seconds, and the processes that run in it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._ended = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._scheduled = 0
        self._running: dict[int, str] = {}

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Run `call` at `time`; calls of the same time run in the order they were made."""
        self._scheduled += 1
        heapq.heappush(self._due, (time, self._scheduled, call))

    def start(self, name: str, process: Process) -> Event:
        """Run a process from now on. The event happens when it ends. `name` is for the message of a deadlock."""
        ended = Event()
        self._scheduled += 1
        identity = self._scheduled
        self._running[identity] = name

        def step() -> None:
            for waited in process:
                if isinstance(waited, Event):
                    if waited.fired:
                        continue
                    return waited.then(step)
                return self.at(self.now + waited, step)
            del self._running[identity]
            self._ended = self.now
            ended.fire()

        self.at(self.now, step)
        return ended

    def run(self) -> float:
        """Let everything happen; returns when the last process ended. Deadlock when some never do."""
        while self._due:
            self.now, _, call = heapq.heappop(self._due)
            call()
        if self._running:
            waiting = [*self._running.values()]
            raise Deadlock(f"{len(waiting)} processes wait for one another, among them {', '.join(waiting[:5])}")
        return self._ended


class Slots:
    """A number of places of which each holder takes one."""

    def __init__(self, count: int):
        self.free = count
        self._waiting: deque[Event] = deque()

    def take(self) -> Event:
        """Happens once a place is the caller's; first come, first served."""
        event = Event()
        if self.free:
            self.free -= 1
            event.fire()
        else:
            self._waiting.append(event)
        return event

    def give(self) -> None:
        if self._waiting:
            self._waiting.popleft().fire()
        else:
            self.free += 1


class Rendezvous:
    """Work that starts when all its `parties` have arrived, and ends for all of them at once."""

    def __init__(self, clock: Clock, name: str, parties: int, work: Callable[[], Process]):
        self.clock, self.name, self.missing, self.work = clock, name, parties, work
        self.done = Event()

    def arrive(self) -> Event:
        """One more party is there; returns what happens when the work is done."""
        self.missing -= 1
        if not self.missing:
            self.clock.start(self.name, self.work()).then(self.done.fire)
        return self.done


def all_of(events: Iterable[Event]) -> Process:
    """Waits until every one of `events` has happened."""
    for event in events:
        yield event


class Link:
    """One direction of a wire, or a memory: `bytes_per_s` shared equally by the flows that cross it."""

    __slots__ = ("name", "bytes_per_s", "moved", "flows")

    def __init__(self, name: Any, bytes_per_s: float):
        self.name, self.bytes_per_s = name, bytes_per_s
        self.moved = 0
        self.flows: dict["_Flow", None] = {}  # ordered: a run must not depend on addresses


class _Flow:
    """Bytes on their way across some links; `left` counts as of `since`."""

    __slots__ = ("links", "left", "rate", "since", "version", "done")

    def __init__(self, links: Sequence[Link], nbytes: int, now: float):
        self.links, self.left, self.since = links, float(nbytes), now
        self.rate, self.version, self.done = 0.0, 0, Event()


class Fabric:
    """Moves bytes across links. A flow is as fast as the smallest of its links' equal shares."""

    def __init__(self, clock: Clock):
        self.clock = clock

    def move(self, nbytes: int, links: Sequence[Link]) -> Event:
        """Start a flow of `nbytes` across all of `links` at once; happens when it has passed."""
        flow = _Flow(links, nbytes, self.clock.now)
        for link in links:
            link.moved += nbytes
            link.flows[flow] = None
        self._share(links)
        return flow.done

    def _share(self, links: Sequence[Link]) -> None:
        """New rates for the flows on `links`, after one has come or gone."""
        now = self.clock.now
        for flow in dict.fromkeys(flow for link in links for flow in link.flows):
            rate = min(link.bytes_per_s / len(link.flows) for link in flow.links)
            if rate != flow.rate:
                flow.left -= flow.rate * (now - flow.since)
                flow.rate, flow.since = rate, now
                flow.version += 1
                self.clock.at(now + max(0.0, flow.left) / rate, self._end(flow, flow.version))

    def _end(self, flow: _Flow, version: int) -> Callable[[], None]:
        def end() -> None:
            if flow.version != version:  # its rate has changed since this was foreseen
                return
            for link in flow.links:
                del link.flows[flow]
            self._share(flow.links)
            flow.done.fire()

        return end
