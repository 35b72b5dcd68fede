"""Files in a directory that both ends see, as a transport: for partitions that no network joins but the weight store's.

A buffer becomes one safetensors file with its tensors under their Hugging Face names (a box of one as `name[0:8,4:6]`),
written under another name and renamed, so that a file is whole or not there. A buffer that goes to several workers or
engines is written once: same label, same file. Nobody here deletes files; who pushes does, with `discard`, when all
engines are done with them.
"""
from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Optional

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .links import SENDER_RANK, Label, LinkError, Meeting, PendingAll, finish_stream, words

logger = logging.getLogger(__name__)

POLL_S = 0.01
PARTS = "mrl_parts"
"""Key of the metadata that says, as JSON, where in the buffer each tensor lies and which box of which tensor it is."""
WHOLE = "buffer"
"""Tensor name of a buffer that is not weights."""


class DiskTransport:
    """Transfers through files in `meeting.folder`, which only senders need; the store tells receivers the paths.

    A transfer is over for its sender when the file is written, whatever becomes of the receivers.
    """

    def __init__(self, meeting: Meeting, deadline: float):
        self.meeting = meeting
        self.counts: dict[tuple[int, int], int] = defaultdict(int)  # transfers so far, by sender and receiver
        self.closed = False

    def broadcast(self, flat: torch.Tensor, deadline: float, label: Optional[Label] = None) -> PendingAll:
        if self.meeting.rank != SENDER_RANK:
            return self.receive(flat, SENDER_RANK, deadline)
        return self._send(flat, [rank for rank in range(self.meeting.world_size) if rank != SENDER_RANK], label)

    def send(self, flat: torch.Tensor, peer: int, deadline: float, label: Optional[Label] = None) -> PendingAll:
        return self._send(flat, [peer], label)

    def receive(self, flat: torch.Tensor, peer: int, deadline: float) -> PendingAll:
        return PendingAll([_Arriving(self, self._key(peer, self.meeting.rank), flat)])

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.meeting.give_up()

    def check(self) -> None:
        """LinkError when nothing more will come."""
        if self.closed:
            raise LinkError(f"link {self.meeting.name} is closed")
        if reason := self.meeting.given_up():
            raise LinkError(f"link {self.meeting.name}: {reason}")

    def _send(self, flat: torch.Tensor, peers: list[int], label: Optional[Label]) -> PendingAll:
        self.check()
        if self.meeting.folder is None or label is None:
            raise ValueError("the disk transport sends labelled buffers into Meeting.folder")
        path = self.meeting.folder / f"{label.key}.safetensors"
        try:
            if not path.exists():
                write(path, flat, label)
            for peer in peers:
                self.meeting.store.set(self._key(self.meeting.rank, peer), str(path))
        except (OSError, SafetensorError) as error:
            raise LinkError(f"link {self.meeting.name}: cannot write {path}: {error}") from error
        except RuntimeError as error:
            raise LinkError(f"link {self.meeting.name}: the weight store is gone ({words(error)})") from error
        return PendingAll([])

    def _key(self, sender: int, receiver: int) -> str:
        """Store key under which the path of the next file from one to the other is told, until it has been read."""
        number = self.counts[sender, receiver]
        self.counts[sender, receiver] += 1
        return f"{self.meeting.name}/{sender}/{receiver}/{number}"


class _Arriving:
    """A buffer to be read when its file has been announced under `key`."""

    def __init__(self, transport: DiskTransport, key: str, flat: torch.Tensor):
        self.transport, self.key, self.flat = transport, key, flat

    def wait(self, deadline: float) -> None:
        name, store = self.transport.meeting.name, self.transport.meeting.store
        path = self._poll(lambda: store.get(self.key).decode() if store.check([self.key]) else None, deadline)
        # Network file systems may show a file a moment after its name is known.
        self._poll(lambda: os.path.exists(path), deadline, f"{path} does not appear: is the directory shared?")
        try:
            read(Path(path), self.flat)
            store.delete_key(self.key)
        except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
            raise LinkError(f"link {name}: cannot read {path}: {error}") from error

    def _poll(self, ask, deadline: float, otherwise: str = "timed out") -> Any:
        """The first answer that is not empty."""
        name = self.transport.meeting.name
        while True:
            self.transport.check()
            try:
                if answer := ask():
                    return answer
            except RuntimeError as error:
                raise LinkError(f"link {name}: the weight store is gone ({words(error)})") from error
            if time.monotonic() > deadline:
                raise LinkError(f"link {name}: {otherwise}")
            time.sleep(POLL_S)


def write(path: Path, flat: torch.Tensor, label: Label) -> None:
    """The tensors of `label` in `flat` as a safetensors file, whole or not at all. OSError, SafetensorError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
    places = [{"key": _key_of(part), "name": part.name, "shape": part.shape, "box": part.box, "offset": part.offset}
              for part in label.parts]
    tensors = {place["key"]: part.values(flat) for place, part in zip(places, label.parts)}
    if not label.parts:
        places, tensors = [{"key": WHOLE, "offset": 0}], {WHOLE: flat}
    try:
        save_file(tensors, unfinished, {"format": "pt", PARTS: json.dumps(places)})
        with open(unfinished, "rb+") as file:
            os.fsync(file.fileno())  # a network file system may notice only now that it is full
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def read(path: Path, flat: torch.Tensor) -> None:
    """Copy a file of `write` into the buffer. ValueError when it does not fit; OSError, SafetensorError, KeyError."""
    with safe_open(path, framework="pt") as file:  # mapped into memory: each byte is copied once
        for place in json.loads(file.metadata()[PARTS]):
            tensor, offset = file.get_tensor(place["key"]), place["offset"]
            values = tensor.view(-1) if tensor.dtype == flat.dtype else tensor.view(-1).view(torch.uint8)
            if values.dtype != flat.dtype or offset + values.numel() > flat.numel():
                raise ValueError(f"{place['key']}: {tensor.numel()} elements of {tensor.dtype} at {offset} do not fit "
                                 f"into {flat.numel()} of {flat.dtype}")
            flat[offset:offset + values.numel()].copy_(values)
    finish_stream(flat.device)


def discard(folder: Path) -> None:
    """Remove what was written under `folder`; what cannot be removed is left, with a warning."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        logger.warning("%s could not be removed whole", folder)


def _key_of(part: Any) -> str:
    if all(stop - start == size for (start, stop), size in zip(part.box, part.shape)):
        return part.name
    return f"{part.name}[{','.join(f'{start}:{stop}' for start, stop in part.box)}]"
