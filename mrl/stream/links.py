"""A sender's end of the links: one communicator to each engine, built, dropped and rebuilt independently."""
from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Callable

import torch
import torch.distributed as dist

from mrl.receiver.mrl_receiver.links import (SENDER_RANK, LinkError, Meeting, Pending, Transport, failed_key,
                                             open_store)
from mrl.receiver.mrl_receiver.transports import connect
from mrl.receiver.mrl_receiver.wire import SyncRequest, ready_key

logger = logging.getLogger(__name__)

READY_POLL_S = 0.005
START_SHARE = 0.5
"""Share of a sync's time after which an engine that has not joined is left out, so that the others can finish."""


@dataclass(frozen=True)
class Target:
    """One engine as a target of one push: the request it gets (less the plan), and the number of its workers."""

    request: SyncRequest
    workers: int


@dataclass
class Links:
    """The links of the sender of one stage. `store` is this thread's connection to the weight store; the buffers that
    are sent lie on `device`."""

    stage: int
    store: dist.Store
    device: torch.device
    open: dict[int, Transport] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)

    def begin(self, targets: list[Target], timeout_s: float) -> None:
        """Wait until every engine stands ready, and build the links that are new. Engines that fail are in `errors`."""
        self.errors = {}
        deadline = time.monotonic() + START_SHARE * timeout_s
        waiting = {target.request.engine: target for target in targets}
        for engine in [*self.open]:
            if engine in waiting and waiting[engine].request.connect:
                self._close(engine)
        ready: list[Target] = []
        while waiting:
            for engine, target in [*waiting.items()]:
                if self.store.check([ready_key(target.request, worker) for worker in range(target.workers)]):
                    ready.append(waiting.pop(engine))
                elif self.store.check([failed_key(target.request.link)]):
                    del waiting[engine]
                    self.drop(engine, "the engine refused the sync")
                elif time.monotonic() > deadline:
                    del waiting[engine]
                    self.drop(engine, f"the engine was not ready within {START_SHARE * timeout_s:g} s")
            time.sleep(READY_POLL_S if waiting else 0)
        new = [target for target in ready if target.request.connect]
        if new:
            with ThreadPoolExecutor(len(new)) as pool:  # one engine that dies now must not keep the others waiting
                list(pool.map(lambda target: self._build(target, deadline), new))

    def broadcast(self, engines: list[int], flat: torch.Tensor, deadline: float,
                  meanwhile: Callable[[], None] = lambda: None) -> None:
        """Send `flat` to the open links among `engines`; returns when each has finished with it or was dropped.

        `meanwhile` runs while the bytes are under way.
        """
        pending: dict[int, Pending] = {}
        for engine in engines:
            if engine in self.open:
                try:
                    pending[engine] = self.open[engine].broadcast(flat, deadline)
                except LinkError as error:
                    self.drop(engine, str(error))
        meanwhile()
        for engine, transfer in pending.items():
            try:
                transfer.wait(deadline)
            except LinkError as error:
                self.drop(engine, str(error))

    def drop(self, engine: int, error: str) -> None:
        """Give up one engine's link; the next push builds another."""
        logger.warning("stage %d: link to engine %d dropped: %s", self.stage, engine, error)
        self.errors.setdefault(engine, error)
        self._close(engine)

    def close(self) -> None:
        for engine in [*self.open]:
            self._close(engine)

    def _build(self, target: Target, deadline: float) -> None:
        request = target.request
        try:
            store = open_store(request.store_host, request.store_port, deadline)
            self.open[request.engine] = connect(request.transport, Meeting(
                store, request.store_host, request.link, str(self.stage), SENDER_RANK, 1 + target.workers, self.device),
                deadline)
        except LinkError as error:
            self.drop(request.engine, str(error))

    def _close(self, engine: int) -> None:
        if transport := self.open.pop(engine, None):
            transport.close()
