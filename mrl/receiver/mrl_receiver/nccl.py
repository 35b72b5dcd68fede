"""NCCL as a transport: GPU to GPU, over NVLink or the network, by a few calls of NCCL's C interface.

Not through torch's NCCL process group: its watchdog ends the whole process when a peer dies, and its set-up cannot be
bounded in time. Here a lost engine costs its trainer one link. Communicators are non-blocking, every wait polls, and
what does not come in time is aborted. (C interface: nccl.h of NCCL 2.18, which newer libraries accept.)
"""
from __future__ import annotations

import ctypes
import threading
import time
from functools import cache
from typing import Callable, Optional

import torch

from .links import CONNECT_TIMEOUT_S, SENDER_RANK, Label, LinkError, Meeting, remaining

POLL_S = 50e-6
WATCH_S = 0.2
"""Between two questions to the store whether a peer has given up: a dead peer on the same machine is silent."""

_SUCCESS, _IN_PROGRESS, _UINT8 = 0, 7, 1
_UNDEFINED = -(1 << 31)


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


class _Config(ctypes.Structure):
    """ncclConfig_t. A library newer than `version` takes its own defaults for what this lacks."""

    _fields_ = [("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint),
                ("blocking", ctypes.c_int), ("cga_cluster_size", ctypes.c_int), ("min_ctas", ctypes.c_int),
                ("max_ctas", ctypes.c_int), ("net_name", ctypes.c_char_p), ("split_share", ctypes.c_int)]


def _non_blocking() -> _Config:
    return _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21800, 0, _UNDEFINED, _UNDEFINED, _UNDEFINED, None, _UNDEFINED)


@cache
def _library() -> ctypes.CDLL:
    """The NCCL that torch has loaded."""
    try:
        nccl = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise LinkError(f"libnccl.so.2 cannot be loaded: {error}") from error
    pointer, count, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    nccl.ncclGetErrorString.restype = nccl.ncclGetLastError.restype = ctypes.c_char_p
    nccl.ncclGetLastError.argtypes = nccl.ncclCommAbort.argtypes = [pointer]
    nccl.ncclCommGetAsyncError.argtypes = [pointer, pointer]
    nccl.ncclCommInitRankConfig.argtypes = [pointer, number, _UniqueId, number, pointer]
    nccl.ncclBroadcast.argtypes = [pointer, pointer, count, number, number, pointer, pointer]
    nccl.ncclSend.argtypes = nccl.ncclRecv.argtypes = [pointer, count, number, number, pointer, pointer]
    nccl.ncclAllGather.argtypes = [pointer, pointer, count, number, pointer, pointer]
    return nccl


class _NcclPending:
    def __init__(self, transport: NcclTransport, done: torch.cuda.Event):
        self.transport, self.done = transport, done

    def wait(self, deadline: float) -> None:
        self.transport.poll(self.done.query, deadline)


class NcclTransport:
    """Transfers between GPUs, on a stream of its own. All ranks need different GPUs."""

    def __init__(self, meeting: Meeting, deadline: float):
        """Meets the other ranks. LinkError when they do not come."""
        self.meeting, self.nccl, self.comm = meeting, _library(), ctypes.c_void_p()
        self.lock = threading.Lock()  # whoever closes must not do it under another thread's call
        self.stream = torch.cuda.Stream(meeting.device)
        deadline = min(deadline, time.monotonic() + CONNECT_TIMEOUT_S)
        try:
            unique, config = self._unique_id(deadline), _non_blocking()
            with torch.cuda.device(meeting.device):
                self._launch("ncclCommInitRankConfig", ctypes.byref(self.comm), meeting.world_size, unique,
                             meeting.rank, ctypes.byref(config))
            self.poll(self._settled, deadline)
        except BaseException:
            self.close()
            raise

    def broadcast(self, flat: torch.Tensor, deadline: float, label: Optional[Label] = None) -> _NcclPending:
        return self._enqueue("ncclBroadcast", flat.data_ptr(), flat.data_ptr(), flat.nbytes, _UINT8, SENDER_RANK,
                             deadline=deadline)

    def send(self, flat: torch.Tensor, peer: int, deadline: float, label: Optional[Label] = None) -> _NcclPending:
        return self._enqueue("ncclSend", flat.data_ptr(), flat.nbytes, _UINT8, peer, deadline=deadline)

    def receive(self, flat: torch.Tensor, peer: int, deadline: float) -> _NcclPending:
        return self._enqueue("ncclRecv", flat.data_ptr(), flat.nbytes, _UINT8, peer, deadline=deadline)

    def all_gather(self, flat: torch.Tensor, deadline: float) -> _NcclPending:
        slice_bytes = flat.nbytes // self.meeting.world_size
        mine = flat.data_ptr() + self.meeting.rank * slice_bytes  # NCCL knows by this that it is in place
        return self._enqueue("ncclAllGather", mine, flat.data_ptr(), slice_bytes, _UINT8, deadline=deadline)

    def close(self) -> None:
        with self.lock:
            if not self.comm:
                return
            comm, self.comm = self.comm, ctypes.c_void_p()
            self.meeting.give_up()  # first: a transfer that we abort may look complete to the peer
            self.nccl.ncclCommAbort(comm)
        self.stream.synchronize()  # an aborted broadcast must not write into memory that is given to others

    def poll(self, ready: Callable[[], bool], deadline: float) -> None:
        """Return when `ready()`. LinkError when NCCL reports an error, a peer gave up, or the deadline has passed."""
        watched = time.monotonic()
        while not ready():
            now = time.monotonic()
            if now > deadline:
                raise LinkError(f"link {self.meeting.name}: timed out")
            if now - watched > WATCH_S:
                watched = now
                self._settled()
                if reason := self.meeting.given_up():
                    raise LinkError(f"link {self.meeting.name}: {reason}")
            time.sleep(POLL_S)

    def _enqueue(self, function: str, *arguments, deadline: float) -> _NcclPending:
        """One operation on the communicator's stream. The first between two ranks waits here for both of them."""
        with torch.cuda.device(self.meeting.device):
            self.stream.wait_stream(torch.cuda.current_stream())
            with self.lock:
                self._require_open()
                self._launch(function, *arguments, self.comm, self.stream.cuda_stream)
            self.poll(self._settled, deadline)  # only now is all of it on the stream
            done = torch.cuda.Event()
            done.record(self.stream)
        return _NcclPending(self, done)

    def _unique_id(self, deadline: float) -> _UniqueId:
        """What rank 0 draws and the others read from the store."""
        key, store = f"{self.meeting.name}/nccl", self.meeting.store
        if self.meeting.rank == SENDER_RANK:
            unique = _UniqueId()
            self._launch("ncclGetUniqueId", ctypes.byref(unique))
            store.set(key, bytes(unique))
            return unique
        try:
            store.wait([key], remaining(deadline))
            return _UniqueId.from_buffer_copy(store.get(key))
        except RuntimeError as error:
            raise LinkError(f"link {self.meeting.name} could not be built: rank {SENDER_RANK} did not come") from error

    def _settled(self) -> bool:
        """Whether NCCL has done on the host what it was told. LinkError when it could not."""
        state = ctypes.c_int()
        with self.lock:
            self._require_open()
            self._launch("ncclCommGetAsyncError", self.comm, ctypes.byref(state))
            self._check("a call before, or a peer", state.value)
        return state.value == _SUCCESS

    def _require_open(self) -> None:
        if not self.comm:
            raise LinkError(f"link {self.meeting.name} is closed")

    def _launch(self, function: str, *arguments) -> None:
        self._check(function, getattr(self.nccl, function)(*arguments))

    def _check(self, what: str, result: int) -> None:
        if result not in (_SUCCESS, _IN_PROGRESS):
            words = self.nccl.ncclGetErrorString(result).decode()
            detail = (self.nccl.ncclGetLastError(self.comm) or b"").decode().strip()
            raise LinkError(f"link {self.meeting.name}: NCCL failed ({what}): {words} {detail}".rstrip())
