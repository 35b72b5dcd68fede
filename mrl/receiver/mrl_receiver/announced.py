"""The next sync over a link, begun when the senders begin: before the engine's own call has reached this worker.

That call comes by way of several processes. Meanwhile the first buckets arrive in memory that holds nothing else; the
parameters are not touched before the call is there, behind a closed gate.
"""
from __future__ import annotations

import atexit
import queue
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Callable, Optional

import torch.distributed as dist

from .links import LinkError, failed_key
from .transfer import Incoming
from .wire import SyncRequest, announced_key

GIVEN_UP = "given up"
"""In the place of an announcement: none will come over this link."""
LISTEN = timedelta(days=1)
"""torch's store writes a warning for each wait that is over in vain."""
WATCH_S = 0.2
END_S = 2.0


class Announced(threading.Thread):
    """Waits, in a thread that lives as long as `link`, for each next sync over it to be announced, and begins it.

    listening, speaking: two connections to the weight store; nobody else uses the first. begin: says that we are ready,
    by the first, and starts to receive.
    """

    def __init__(self, listening: dist.Store, speaking: dist.Store, link: str,
                 begin: Callable[[SyncRequest, dist.Store], Incoming]):
        super().__init__(name="mrl-announced", daemon=True)
        self.listening, self.speaking, self.link, self.begin = listening, speaking, link, begin
        self.turns: queue.Queue[Optional[str]] = queue.Queue()
        self.found: queue.Queue[tuple[int, Incoming] | Exception] = queue.Queue()
        self.taken = threading.Event()
        self.lock, self.closed = threading.Lock(), False
        self.key: Optional[str] = None  # what is waited for
        atexit.register(self.close)  # a thread within the store would abort an interpreter that ends

    def listen(self, after: int) -> None:
        """Begin the sync that follows push `after`, when it comes."""
        self.key = announced_key(self.link, after)
        self.turns.put(self.key)

    def run(self) -> None:
        try:
            while (key := self.turns.get()) is not None and (said := self._hear(key)) != GIVEN_UP:
                request = SyncRequest.from_json(said)
                with self.lock:
                    if self.closed:
                        return
                    self.key = None
                    self.taken.clear()
                    incoming = self.begin(request, self.listening)
                    self.found.put((request.push, incoming))
                self._watch(incoming)
        except Exception as error:  # the store is gone with the trainers, or the link is broken
            self.found.put(error)

    def take(self, request: SyncRequest, deadline: float) -> Incoming:
        """What has begun for `request`. LinkError when it has not, and will not."""
        try:
            found = self.found.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise LinkError(f"link {request.link}: push {request.push} was not announced in time") from None
        self.taken.set()
        if isinstance(found, Exception):
            raise LinkError(f"link {request.link}: push {request.push} could not begin: {found}") from found
        push, incoming = found
        if push != request.push:
            incoming.give_up()
            raise LinkError(f"link {request.link}: push {push} was announced, and push {request.push} is asked for")
        return incoming

    def close(self) -> None:
        """Give up what has begun and has not been taken; nothing begins any more, and the thread ends."""
        atexit.unregister(self.close)
        with self.lock:
            self.closed = True
            self.taken.set()
            while not self.found.empty():
                if isinstance(found := self.found.get(), tuple):
                    found[1].give_up()
        self.turns.put(None)
        if self.key is not None:
            with suppress(RuntimeError):  # without the store the thread ends by itself
                self.speaking.set(self.key, GIVEN_UP)
        self.join(END_S)

    def _watch(self, incoming: Incoming) -> None:
        """Until the engine's call is there: give up when it will not come, as the gate has refused the sync. Senders
        may be in the middle of a transfer that nobody will ever take."""
        while not self.taken.wait(WATCH_S) and not self.closed:
            if self._failed():
                with suppress(queue.Empty):  # the call has come after all, and whoever has it finds out by itself
                    mine = self.found.get_nowait()
                    incoming.give_up()
                    self.found.put(mine)
                return

    def _failed(self) -> bool:
        try:
            return self.listening.check([failed_key(self.link)])
        except RuntimeError:  # the store is gone with the trainers
            return True

    def _hear(self, key: str) -> str:
        while True:
            try:
                self.listening.wait([key], LISTEN)
                return self.listening.get(key).decode()
            except dist.DistStoreError:  # not yet
                continue
