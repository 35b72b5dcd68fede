"""Replays a sync plan on a described cluster, as a discrete-event simulation. Pure, and needs no torch.

What is simulated is what `mrl/stream` and `mrl/receiver` do: every rank gathers its slices in plan order into a ring of
`buffers` slots; a sender sends one slice at a time, to the workers of an engine in turn and to several engines at once,
and frees its slot when all have it; a worker receives one bucket at a time, in plan order, into a ring of its own, and
joins and copies it while it receives the next. A transfer begins when both of its ends have come to it. Wires carry
what the network says, shared equally; a message costs its latency besides; copies go at the memory's speed, and a
worker is taken to copy all of a bucket. Nothing else costs time.
"""
from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Iterable, Optional, Sequence

from mrl.reshard.engine_layout import EngineLayout
from mrl.reshard.events import Clock, Event, Fabric, Link, Process, Rendezvous, Slots, all_of
from mrl.reshard.network import Network
from mrl.reshard.plan import Outline, SliceOutline

MEMORY_GB_S = 3350.0
"""Of an H100's memory."""
_COPY = 2
"""Bytes of memory traffic per byte copied: one read, one write."""


@dataclass(frozen=True, slots=True)
class LinkUse:
    """All links of one kind: how many carried anything, the bytes of the busiest and on average, and the share of the
    time that the busiest would have needed for its bytes alone."""

    kind: str
    links: int
    busiest_bytes: int
    mean_bytes: float
    utilisation: float


@dataclass(frozen=True, slots=True)
class Simulated:
    """One replay. `seconds` until the last worker has the last bucket in place."""

    seconds: float
    uses: tuple[LinkUse, ...]

    @property
    def bottleneck(self) -> LinkUse:
        """The kind of link of which one was busy for the largest share of the time."""
        return max(self.uses, key=lambda use: use.utilisation)


def simulate(
    outlines: Iterable[Outline], engines: EngineLayout, network: Network, buffers: int,
    memory_gb_s: float = MEMORY_GB_S,
) -> Simulated:
    """Replay the buckets of a plan, pushed to every one of `engines`.

    buffers: `sync.buffers`, slots of one slice on every sender and of one bucket on every worker. memory_gb_s: of each
    GPU, reads and writes together. ValueError when there are no buffers.
    """
    if buffers < 1:
        raise ValueError(f"buffers is {buffers}, but must be at least 1")
    replay = _Replay(engines, network, buffers, memory_gb_s)
    for outline in outlines:
        replay.add(outline)
    return replay.run()


class _Wires:
    """The links of the cluster, made when they are first used."""

    def __init__(self, network: Network, memory_gb_s: float):
        self.links: dict[tuple, Link] = {}
        self.speed = {
            "trainer NIC out": network.nic_gb_s, "trainer NIC in": network.nic_gb_s,
            "engine NIC in": network.nic_gb_s, "trainer NVLink": network.nvlink_gb_s,
            "engine NVLink": network.nvlink_gb_s, "trainer memory": memory_gb_s, "engine memory": memory_gb_s,
        }

    def __call__(self, kind: str, *where: int) -> Link:
        key = (kind, *where)
        if key not in self.links:
            self.links[key] = Link(key, self.speed[kind] * 1e9)
        return self.links[key]

    def uses(self, seconds: float) -> tuple[LinkUse, ...]:
        by_kind: dict[str, list[Link]] = defaultdict(list)
        for link in self.links.values():
            by_kind[link.name[0]].append(link)
        found = []
        for kind in self.speed:
            if links := by_kind[kind]:
                moved = [link.moved for link in links]
                found.append(LinkUse(kind, len(links), max(moved), sum(moved) / len(moved),
                                     max(moved) / links[0].bytes_per_s / seconds if seconds else 0.0))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class _Gather:
    """A rank's part in gathering one slice; `mine`: it ends in this rank's ring."""

    work: Rendezvous
    mine: bool


@dataclass(frozen=True, slots=True)
class _Shipment:
    """One slice on its sender: sent once it is filled, by the transfers of every engine it is for."""

    filled: Event
    engines: Sequence[Sequence[Rendezvous]]


@dataclass(frozen=True, slots=True)
class _Arrival:
    """One bucket at one worker: what brings it, what joins its slices, and its bytes once whole."""

    transfer: Optional[Rendezvous]
    join: Optional[Rendezvous]
    nbytes: int


def _in_turn(transfers: Sequence[Rendezvous]) -> Process:
    for transfer in transfers:
        yield transfer.arrive()


class _Replay:
    """The processes of one replay: a rank gathers and, as a sender, sends; a worker receives, joins and copies."""

    def __init__(self, engines: EngineLayout, network: Network, buffers: int, memory_gb_s: float):
        self.engines, self.network, self.buffers = engines, network, buffers
        self.clock = Clock()
        self.fabric = Fabric(self.clock)
        self.wires = _Wires(network, memory_gb_s)
        self.gathers: dict[int, list[_Gather]] = defaultdict(list)
        self.shipments: dict[int, list[_Shipment]] = defaultdict(list)
        self.arrivals: dict[tuple[int, int], list[_Arrival]] = defaultdict(list)
        self.node = engines.node

    def add(self, outline: Outline) -> None:
        """The next bucket: who gathers, who ships to whom, who receives."""
        transfers: list[dict[int, list[Rendezvous]]] = [{} for _ in outline.slices]
        for engine in outline.engines:
            joins = self._joins(outline, engine)
            for index, workers in self._routes(outline):
                part, transfer = outline.slices[index], None
                if part.nbytes:
                    transfer = Rendezvous(self.clock, f"bucket {outline.index} to engine {engine}", 1 + len(workers),
                                          partial(self._send, part, engine, workers))
                    transfers[index].setdefault(engine, []).append(transfer)
                for worker in workers:
                    arrival = _Arrival(transfer, joins.get(worker // self.node), sum(s.nbytes for s in outline.slices))
                    self.arrivals[engine, worker].append(arrival)
        for part, sends in zip(outline.slices, transfers):
            if not part.nbytes:
                continue
            gather = Rendezvous(self.clock, f"gather of bucket {outline.index}", len(part.ranks),
                                partial(self._collect, part))
            for rank in part.ranks:
                self.gathers[rank].append(_Gather(gather, rank == part.sender))
            self.shipments[part.sender].append(_Shipment(gather.done, [*sends.values()]))

    def _routes(self, outline: Outline) -> list[tuple[int, tuple[int, ...]]]:
        """(slice, workers that one transfer brings it to), within one engine."""
        world = self.engines.world
        if outline.mode == "broadcast":
            return [(0, tuple(range(world)))]
        if outline.mode == "direct":
            return [(0, (outline.worker,))]
        return [(worker % self.node, (worker,)) for worker in range(world)]

    def _joins(self, outline: Outline, engine: int) -> dict[int, Rendezvous]:
        """The all-gather of each of an engine's nodes, for buckets that come in slices."""
        if outline.mode != "slices" or self.node == 1:
            return {}
        return {node: Rendezvous(self.clock, f"all-gather of bucket {outline.index} in engine {engine}", self.node,
                                 partial(self._all_gather, outline, engine, node))
                for node in range(self.engines.world // self.node)}

    def run(self) -> Simulated:
        for rank, gathers in self.gathers.items():
            slots = Slots(self.buffers)
            self.clock.start(f"rank {rank}, gathering", self._gathering(gathers, slots))
            if rank in self.shipments:
                self.clock.start(f"rank {rank}, sending", self._sending(self.shipments[rank], slots))
        for (engine, worker), arrivals in self.arrivals.items():
            name, slots = f"engine {engine} worker {worker}", Slots(self.buffers)
            received = [Event() for _ in arrivals]
            joined = [Event() for _ in arrivals]
            self.clock.start(f"{name}, receiving", self._receiving(arrivals, slots, received))
            self.clock.start(f"{name}, joining", self._joining(arrivals, received, joined))
            memory = self.wires("engine memory", engine, worker)
            self.clock.start(f"{name}, copying", self._copying(arrivals, joined, slots, memory))
        seconds = self.clock.run()
        return Simulated(seconds, self.wires.uses(seconds))

    # -- processes

    def _gathering(self, gathers: list[_Gather], slots: Slots) -> Process:
        for gather in gathers:
            if gather.mine:
                yield slots.take()
            yield gather.work.arrive()

    def _sending(self, shipments: list[_Shipment], slots: Slots) -> Process:
        for shipment in shipments:
            yield shipment.filled
            first, *others = shipment.engines
            beside = [self.clock.start(transfers[0].name, _in_turn(transfers)) for transfers in others]
            yield from _in_turn(first)
            yield from all_of(beside)
            slots.give()

    def _receiving(self, arrivals: list[_Arrival], slots: Slots, received: list[Event]) -> Process:
        for arrival, event in zip(arrivals, received):
            yield slots.take()
            if arrival.transfer:
                yield arrival.transfer.arrive()
            event.fire()

    def _joining(self, arrivals: list[_Arrival], received: list[Event], joined: list[Event]) -> Process:
        for arrival, before, event in zip(arrivals, received, joined):
            yield before
            if arrival.join:
                yield arrival.join.arrive()
            event.fire()

    def _copying(self, arrivals: list[_Arrival], joined: list[Event], slots: Slots, memory: Link) -> Process:
        for arrival, before in zip(arrivals, joined):
            yield before
            yield self.fabric.move(_COPY * arrival.nbytes, [memory])
            slots.give()

    # -- transfers

    def _collect(self, part: SliceOutline) -> Process:
        """Pack on every rank, bring to the sender, assemble there, perhaps quantise; a rank alone only copies."""
        share = part.gathered // len(part.ranks)
        others = [rank for rank in part.ranks if rank != part.sender]
        if others:
            yield from all_of([self.fabric.move(_COPY * share, [self.wires("trainer memory", rank)])
                               for rank in part.ranks])
            yield self.network.latency_s
            yield from all_of([self.fabric.move(share, self._way(rank, part.sender)) for rank in others])
        traffic = _COPY * part.gathered
        if part.nbytes != part.gathered:  # read twice, to find the scales, and written once more
            traffic += 2 * part.gathered + part.nbytes
        yield self.fabric.move(traffic, [self.wires("trainer memory", part.sender)])

    def _way(self, rank: int, sender: int) -> list[Link]:
        """From one trainer rank to another: within the node, or out of one's NIC into the other's."""
        per_node = self.network.gpus_per_node
        if rank // per_node == sender // per_node:
            return [self.wires("trainer NVLink", sender)]
        return [self.wires("trainer NIC out", rank), self.wires("trainer NIC in", sender)]

    def _send(self, part: SliceOutline, engine: int, workers: tuple[int, ...]) -> Process:
        """From a sender to one worker, or down a chain of all: into each node once, and on over NVLink."""
        nodes = range(workers[0] // self.node, workers[-1] // self.node + 1)
        way = [self.wires("trainer NIC out", part.sender)]
        way += [self.wires("engine NIC in", engine, workers[0] if len(workers) == 1 else node * self.node)
                for node in nodes]
        if len(workers) > 1:
            way += [self.wires("engine NVLink", engine, worker) for worker in workers if worker % self.node]
        yield self.network.latency_s * len(nodes)
        yield self.fabric.move(part.nbytes, way)

    def _all_gather(self, outline: Outline, engine: int, node: int) -> Process:
        """Every GPU of the node takes the slices of all others, through its own NVLink."""
        workers = range(node * self.node, (node + 1) * self.node)
        foreign = max(part.nbytes for part in outline.slices) * (self.node - 1)
        yield self.network.latency_s
        yield self.fabric.move(foreign, [self.wires("engine NVLink", engine, worker) for worker in workers])
