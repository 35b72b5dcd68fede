"""One push on one rank: gather bucket i+1 while bucket i is on its way to every engine."""
from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Optional

import torch

from mrl.receiver.mrl_receiver.checksum import checksum, whole
from mrl.receiver.mrl_receiver.links import own_stream
from mrl.stream.gather import StageBuckets
from mrl.stream.links import Links, Target


@dataclass
class Sent:
    """What one rank did in a push: seconds of gathering and of sending, and the engines that its links lost."""

    gather_s: float = 0.0
    send_s: float = 0.0
    errors: dict[int, str] = field(default_factory=dict)


def stream(stage: StageBuckets, links: Optional[Links], targets: list[Target], timeout_s: float) -> Sent:
    """Gather every bucket of the stage and, on its sender (`links` given), send it to all `targets`.

    Collective over the stage's tensor-parallel ranks. Never fails because of an engine: such an engine is in
    `Sent.errors`, and all buckets are gathered regardless, so that no rank waits for another.
    """
    sent = Sent()
    if links is None:
        for position in range(len(stage.buckets)):
            _fill(stage, position, sent)
        return sent
    sender = _SenderThread(stage, links, targets, timeout_s, sent)
    sender.start()
    for position in range(len(stage.buckets)):
        sender.free.acquire()
        _fill(stage, position, sent)
        sender.filled.release()
    sender.join()
    if sender.crash is not None:
        raise sender.crash
    sent.errors = dict(links.errors)
    return sent


def _fill(stage: StageBuckets, position: int, sent: Sent) -> None:
    began = time.monotonic()
    stage.fill(position)
    sent.gather_s += time.monotonic() - began


class _SenderThread(threading.Thread):
    """Sends the filled buckets in order; `free` counts buffers that every link has finished with."""

    def __init__(self, stage: StageBuckets, links: Links, targets: list[Target], timeout_s: float, sent: Sent):
        super().__init__(name="mrl-send", daemon=True)
        self.stage, self.links, self.targets, self.timeout_s, self.sent = stage, links, targets, timeout_s, sent
        self.free = threading.Semaphore(len(stage.ring))
        self.filled = threading.Semaphore(0)
        self.crash: Optional[BaseException] = None

    def run(self) -> None:
        try:
            with own_stream(self.stage.ring[0].device):
                self._send_all()
        except BaseException as error:  # handed to the main thread, which must not hang in `free` meanwhile
            self.crash = error
            for _ in self.stage.buckets:
                self.free.release()

    def _send_all(self) -> None:
        deadline = time.monotonic() + self.timeout_s
        self.links.begin(self.targets, self.timeout_s)
        engines = [target.request.engine for target in self.targets]
        verifying = [target.request.engine for target in self.targets if target.request.verify]
        sums: list[int] = []
        for position in range(len(self.stage.buckets)):
            self.filled.acquire()
            began = time.monotonic()
            add_sums = (lambda: sums.extend(self._checksums(position))) if verifying else (lambda: None)
            self.links.broadcast(engines, self.stage.flat(position), deadline, meanwhile=add_sums)
            self.sent.send_s += time.monotonic() - began
            self.free.release()
        if verifying:
            message = torch.tensor(sums, dtype=torch.int64, device=self.stage.ring[0].device)
            self.links.broadcast(verifying, message, deadline)

    def _checksums(self, position: int) -> list[int]:
        """Of the HF tensors in a bucket, in order."""
        flat = self.stage.flat(position)
        return [checksum(flat[item.offset:item.offset + item.numel].view(item.shape), whole(item.shape))
                for item in self.stage.buckets[position].items]
