"""The next sync over a link, begun when the senders begin: before the engine's own call has reached this worker.

That call comes by way of several processes. Meanwhile the first buckets arrive in memory that holds nothing else; the
parameters are not touched before the call is there, behind a closed gate.
"""
from __future__ import annotations

import queue
import threading
import time
from datetime import timedelta
from typing import Callable, Optional

import torch.distributed as dist

from .links import LinkError
from .transfer import Incoming
from .wire import SyncRequest, announced_key

LISTEN_S = 5.0
"""How long a thread that is not needed any more may go on waiting."""


class Announced(threading.Thread):
    """Waits, in a thread that lives as long as `link`, for each next sync over it to be announced, and begins it.

    store: a connection to the weight store that nobody else uses. begin: says that we are ready, by that connection,
    and starts to receive.
    """

    def __init__(self, store: dist.Store, link: str, begin: Callable[[SyncRequest, dist.Store], Incoming]):
        super().__init__(name="mrl-announced", daemon=True)
        self.store, self.link, self.begin = store, link, begin
        self.turns: queue.Queue[Optional[int]] = queue.Queue()
        self.found: queue.Queue[tuple[int, Incoming] | Exception] = queue.Queue()
        self.lock, self.closed = threading.Lock(), False

    def listen(self, after: int) -> None:
        """Begin the sync that follows push `after`, when it comes."""
        self.turns.put(after)

    def run(self) -> None:
        try:
            while (after := self.turns.get()) is not None and self._came(key := announced_key(self.link, after)):
                request = SyncRequest.from_json(self.store.get(key))
                with self.lock:
                    if not self.closed:
                        self.found.put((request.push, self.begin(request, self.store)))
        except Exception as error:  # the store is gone with the trainers, or the link is broken
            self.found.put(error)

    def take(self, request: SyncRequest, deadline: float) -> Incoming:
        """What has begun for `request`. LinkError when it has not, and will not."""
        try:
            found = self.found.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise LinkError(f"link {request.link}: push {request.push} was not announced in time") from None
        if isinstance(found, Exception):
            raise LinkError(f"link {request.link}: push {request.push} could not begin: {found}") from found
        push, incoming = found
        if push != request.push:
            incoming.give_up()
            raise LinkError(f"link {request.link}: push {push} was announced, and push {request.push} is asked for")
        return incoming

    def close(self) -> None:
        """Give up what has begun and has not been taken; nothing begins any more."""
        with self.lock:
            self.closed = True
            self.turns.put(None)
            while not self.found.empty():
                if isinstance(found := self.found.get(), tuple):
                    found[1].give_up()

    def _came(self, key: str) -> bool:
        """Whether the key was set before we were closed."""
        while not self.closed:
            try:
                self.store.wait([key], timedelta(seconds=LISTEN_S))
                return True
            except dist.DistStoreError:  # not yet
                continue
        return False
