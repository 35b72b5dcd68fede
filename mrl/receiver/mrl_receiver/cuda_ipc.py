"""Copies within one GPU as a transport: for engines on the trainers' own GPUs.

The sender's memory is mapped into the worker's process, by CUDA's inter-process handles as torch makes them: buffers
once, parameters that it lends in place for one sync. Of a transfer, only a line of JSON goes over a local socket, the
first time with what lies where in the parameters, and an answer when the worker has copied the weights out. Each worker
can receive only from the sender on its own GPU, so every rank it hears of must be there.
"""
from __future__ import annotations

import json
import shutil
import socket
import struct
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Optional

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .in_place import InPlace
from .links import SENDER_RANK, Label, LinkError, Meeting, PendingAll, finish_stream, words

WATCH_S = 0.2
"""Between two questions to the store whether a peer has given up. A dead peer shows at once, as a closed socket."""
POLL_S = 0.005
STALL_S = 20
"""For what is read as soon as it comes; a peer that takes longer hangs."""
_BINARY = (1, 4, 6)  # of what torch's _share_cuda_ returns, which is handed to _new_shared_cuda as it is


class CudaIpcTransport:
    """Transfers between processes on one GPU. Ranks meet at their first transfer to one another, not before."""

    def __init__(self, meeting: Meeting, deadline: float):
        self.meeting = meeting
        self.gpu = self._gpu()
        self.folder: Optional[Path] = None  # of the socket at which this rank, once it sends, awaits its receivers
        self.listener: Optional[socket.socket] = None
        self.peers: dict[int, _Peer] = {}
        self.closed = False

    def broadcast(self, flat: torch.Tensor, deadline: float, label: Optional[Label] = None) -> PendingAll:
        if self.meeting.rank != SENDER_RANK:
            return PendingAll([self.receive(flat, SENDER_RANK, deadline)])
        return PendingAll([self.send(flat, peer, deadline) for peer in range(self.meeting.world_size)
                           if peer != SENDER_RANK])

    def send(self, flat: torch.Tensor, peer: int, deadline: float, label: Optional[Label] = None) -> _Sending:
        finish_stream(flat.device)  # the worker's copy is ordered by nothing but the message
        receiver, storage = self._receiver(peer, deadline), flat.untyped_storage()
        number, gone, known = receiver.begin(), receiver.forget_dead(), receiver.exported.get(storage.data_ptr())
        exported = None
        if known is None:
            exported = self._exported(storage)
            known = receiver.exported[storage.data_ptr()] = receiver.new_storage(), StorageWeakRef(storage)
        self.say(peer, {"number": number, "storages": [[known[0], exported]], "gone": gone,
                        "start": flat.storage_offset() * flat.itemsize, "nbytes": flat.nbytes})
        return _Sending(self, peer, number)

    def lend(self, held: InPlace, peer: int, deadline: float) -> _Sending:
        receiver = self._receiver(peer, deadline)
        number, storages = receiver.begin(), []
        for storage in held.storages:
            exported = None
            if storage._cdata not in receiver.lent:
                # Torch keeps what it has exported until its reader has let go. This may be freed before: a reader that
                # dies never does.
                alias = self._alias(storage)
                exported = self._exported(alias)
                receiver.lent[storage._cdata] = receiver.new_storage(), alias
            storages.append((receiver.lent[storage._cdata][0], exported))
        told_in = receiver.described.setdefault(held.description, number)
        more = [held.description] if told_in == number else []
        self.say(peer, {"number": number, "storages": storages, "gone": [], "nbytes": held.nbytes,
                        "described": told_in}, *more)
        return _Sending(self, peer, number)

    def receive(self, flat: torch.Tensor, peer: int, deadline: float) -> _Receiving:
        return _Receiving(self.borrow(flat.nbytes, peer, deadline), flat)

    def borrow(self, nbytes: int, peer: int, deadline: float) -> _Borrowing:
        return _Borrowing(self, peer, self._sender(peer, deadline).begin(), nbytes)

    def let_go(self) -> None:
        for peer in self.peers.values():
            peer.let_go()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.meeting.give_up()
        for peer in self.peers.values():
            peer.connection.close()
            peer.mapped.clear()  # or the sender's memory could not be used for anything else
        if self.listener is not None:
            self.listener.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def hear(self, peer: int, number: int, deadline: float) -> dict[str, Any]:
        """What `peer` says about transfer `number`."""
        other = self.peers[peer]
        while number not in other.heard:
            try:
                if other.connection.poll(min(WATCH_S, max(0.0, deadline - time.monotonic()))):
                    line, *description = other.connection.recv_bytes().split(b"\n", 1)
                    message = json.loads(line)
                    other.heard[message["number"]] = message
                    if description:
                        other.descriptions[message["described"]] = description[0]
                else:
                    self._check(deadline)
            except (OSError, EOFError) as error:
                raise self._lost(peer, error) from error
        return other.heard.pop(number)

    def map_lent(self, peer: int, message: dict[str, Any], nbytes: int) -> _Lent:
        """What a sender's message tells of, mapped here."""
        other, number = self.peers[peer], message["number"]
        for storage in message["gone"]:
            other.mapped.pop(storage, None)
        if message["nbytes"] != nbytes:
            raise LinkError(f"link {self.meeting.name}: rank {peer} sends {message['nbytes']} bytes, not {nbytes}")
        in_place = "described" in message
        try:
            for storage, exported in message["storages"]:
                if exported is not None:
                    other.mapped[storage] = _Mapped(self._map(exported), in_place)
            found = [other.mapped[storage] for storage, _ in message["storages"]]
            if in_place:
                return _Lent(self, peer, number, None, {}, other.descriptions[message["described"]],
                             tuple(one.storage for one in found))
            flat = torch.empty(0, dtype=torch.uint8, device=self.meeting.device).set_(
                found[0].storage, message["start"], (nbytes,), (1,))
        except (RuntimeError, KeyError) as error:  # KeyError: closed by another thread
            raise LinkError(f"link {self.meeting.name}: rank {peer}'s memory cannot be read: {words(error)}") from error
        return _Lent(self, peer, number, flat, found[0].made)

    def say(self, peer: int, message: dict[str, Any], *more: bytes) -> None:
        """One line, and what follows it."""
        try:
            self.peers[peer].connection.send_bytes(b"\n".join([json.dumps(message).encode(), *more]))
        except OSError as error:
            raise self._lost(peer, error) from error

    def _lost(self, peer: int, error: Exception) -> LinkError:
        if isinstance(error, BlockingIOError):
            return LinkError(f"link {self.meeting.name}: rank {peer} hangs: nothing was read or sent for {STALL_S} s")
        return LinkError(f"link {self.meeting.name}: rank {peer} is gone ({error or 'closed'})")

    def _exported(self, storage: torch.UntypedStorage) -> list:
        try:
            return self._export(storage)
        except RuntimeError as error:
            raise LinkError(f"link {self.meeting.name}: the memory cannot be shared: {words(error)}") from error

    # -- meeting

    def _receiver(self, peer: int, deadline: float) -> _Peer:
        """The connection to one we send to, who calls at our socket."""
        if self.listener is None:
            self._listen()
        while peer not in self.peers:
            self._check(deadline)
            try:
                connection = _connection(self.listener.accept()[0])
                self.peers[json.loads(connection.recv_bytes())["rank"]] = _Peer(connection)
            except TimeoutError:
                continue
            except (OSError, EOFError) as error:
                raise LinkError(f"link {self.meeting.name}: a receiver went away ({error})") from error
        self._require_open(deadline)
        return self.peers[peer]

    def _sender(self, peer: int, deadline: float) -> _Peer:
        """The connection to one we receive from, at whose socket we call."""
        key = self._key(peer)
        while peer not in self.peers:
            self._check(deadline)
            if not self._store("check", [key]):
                time.sleep(POLL_S)
                continue
            place = json.loads(self._store("get", key))
            if place["gpu"] != self.gpu:
                raise LinkError(f"link {self.meeting.name}: rank {peer} sends from GPU {place['gpu']}, this rank is on "
                                f"{self.gpu}: cuda_ipc joins an engine's worker with a trainer rank on its own GPU")
            caller = socket.socket(socket.AF_UNIX)
            try:
                caller.connect(place["path"])
                self.peers[peer] = _Peer(_connection(caller))
                self.say(peer, {"rank": self.meeting.rank})
            except OSError as error:
                raise LinkError(f"link {self.meeting.name}: no socket at {place['path']}: {error}; cuda_ipc needs "
                                "trainers and engines to share a file system for temporary files") from error
        self._require_open(deadline)
        return self.peers[peer]

    def _listen(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mrl-"))  # for this user alone
        self.listener = socket.socket(socket.AF_UNIX)
        try:
            self.listener.bind(str(self.folder / "ipc"))
            self.listener.listen(self.meeting.world_size)
        except OSError as error:
            raise LinkError(f"link {self.meeting.name}: no socket in {self.folder}: {error}") from error
        self.listener.settimeout(WATCH_S)
        self._store("set", self._key(self.meeting.rank), json.dumps({"path": str(self.folder / "ipc"),
                                                                     "gpu": self.gpu}))

    def _key(self, rank: int) -> str:
        return f"{self.meeting.name}/ipc/{rank}"

    def _store(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self.meeting.store, method)(*arguments)
        except RuntimeError as error:
            raise LinkError(f"link {self.meeting.name}: the weight store is gone ({words(error)})") from error

    def _check(self, deadline: float) -> None:
        """Between two waits, as it costs a question to the store."""
        self._require_open(deadline)
        if reason := self.meeting.given_up():
            raise LinkError(f"link {self.meeting.name}: {reason}")

    def _require_open(self, deadline: float) -> None:
        if self.closed:
            raise LinkError(f"link {self.meeting.name} is closed")
        if time.monotonic() > deadline:
            raise LinkError(f"link {self.meeting.name}: timed out")

    # -- CUDA

    def _gpu(self) -> str:
        """Which GPU this rank uses, under whatever number."""
        if self.meeting.device.type != "cuda":
            raise LinkError(f"link {self.meeting.name}: cuda_ipc needs buffers on a GPU, not on "
                            f"{self.meeting.device.type}")
        return str(torch.cuda.get_device_properties(self.meeting.device).uuid)

    def _alias(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """The same memory, without a claim to it."""
        return torch._C._construct_storage_from_data_pointer(storage.data_ptr(), storage.device, storage.nbytes())

    def _export(self, storage: torch.UntypedStorage) -> list:
        """What another process needs to map `storage`."""
        handles = list(storage._share_cuda_())
        return [value.hex() if i in _BINARY else value for i, value in enumerate(handles)]

    def _map(self, exported: list) -> torch.UntypedStorage:
        """The other process's memory as ours."""
        handles = [bytes.fromhex(value) if i in _BINARY else value for i, value in enumerate(exported)]
        handles[0] = torch.cuda.current_device()  # the same GPU may have another number here
        return torch.UntypedStorage._new_shared_cuda(*handles)


def _connection(end: socket.socket) -> Connection:
    """Messages over a connected socket. OSError for one that a peer does not read, or send the rest of, in time."""
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", STALL_S, 0))
    return Connection(end.detach())


@dataclass
class _Mapped:
    """A peer's memory here, and what was made of it if it is a buffer. in_place: it is not one."""

    storage: torch.UntypedStorage
    in_place: bool
    made: dict[Any, Any] = field(default_factory=dict)


@dataclass
class _Peer:
    """The other end of a socket. Transfers are numbered, in both processes alike, and so are storages.

    exported: by address, the number and the memory of each buffer that the peer has mapped; lent: by identity, those of
    storages that it has for this sync; mapped: the peer's memory here, by number. described: what the peer has heard of
    what lies in place, with the transfer in which it did; descriptions: what we have heard, by transfer. heard:
    messages that nobody has asked for yet.
    """

    connection: Connection
    transfers: int = 0
    storages: int = 0
    exported: dict[int, tuple[int, StorageWeakRef]] = field(default_factory=dict)
    mapped: dict[int, _Mapped] = field(default_factory=dict)
    lent: dict[int, tuple[int, torch.UntypedStorage]] = field(default_factory=dict)
    described: dict[bytes, int] = field(default_factory=dict)
    descriptions: dict[int, bytes] = field(default_factory=dict)
    heard: dict[int, dict[str, Any]] = field(default_factory=dict)

    def begin(self) -> int:
        self.transfers += 1
        return self.transfers

    def forget_dead(self) -> list[int]:
        """The numbers of exported buffers that have been freed here; until the peer unmaps them they take memory."""
        dead = [address for address, (_, memory) in self.exported.items() if memory.expired()]
        return [self.exported.pop(address)[0] for address in dead]

    def new_storage(self) -> int:
        """The number of one more."""
        self.storages += 1
        return self.storages

    def let_go(self) -> None:
        """Of all that is not a buffer."""
        self.lent.clear()
        self.mapped = {number: one for number, one in self.mapped.items() if not one.in_place}


@dataclass(frozen=True)
class _Sending:
    transport: CudaIpcTransport
    peer: int
    number: int

    def wait(self, deadline: float) -> None:
        self.transport.hear(self.peer, self.number, deadline)


@dataclass(frozen=True)
class _Lent:
    transport: CudaIpcTransport
    peer: int
    number: int
    flat: Optional[torch.Tensor]
    made: dict[Any, Any]
    description: bytes = b""
    storages: tuple[torch.UntypedStorage, ...] = ()

    def give_back(self) -> None:
        self.transport.say(self.peer, {"number": self.number})


@dataclass(frozen=True)
class _Borrowing:
    transport: CudaIpcTransport
    peer: int
    number: int
    nbytes: int

    def wait(self, deadline: float) -> _Lent:
        return self.transport.map_lent(self.peer, self.transport.hear(self.peer, self.number, deadline), self.nbytes)


@dataclass(frozen=True)
class _Receiving:
    borrowing: _Borrowing
    flat: torch.Tensor

    def wait(self, deadline: float) -> None:
        lent = self.borrowing.wait(deadline)
        self.flat.view(torch.uint8).copy_(lent.flat)
        finish_stream(self.flat.device)
        lent.give_back()
