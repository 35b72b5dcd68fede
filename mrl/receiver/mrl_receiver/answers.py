"""What a worker answers to the gate, the same in every engine: a few calls, each a method name and a JSON argument.

An engine's own module brings a call to every worker, has it answered here, and brings the answers back.
"""
from __future__ import annotations

import logging
import os
import traceback
from typing import Any, Callable, Collection, Mapping, Optional

import torch

from .receive import Receiver
from .trace import Loader
from .wire import SyncRequest

logger = logging.getLogger(__name__)


def make_receiver(model: torch.nn.Module, load: Loader, worker: int, workers: int,
                  refresh: Callable[[], None] = lambda: None, derived: Collection[str] = ()) -> Receiver:
    """The Receiver of a worker whose server mrl has started: who it is stands in the environment."""
    return Receiver(model, load, os.environ["MRL_RUN_ID"], int(os.environ["MRL_ENGINE"]),
                    int(os.environ["MRL_INCARNATION"]), worker, workers, refresh, derived)


def answer(receiver: Callable[[], Receiver], method: str, argument: Optional[str] = None) -> dict[str, Any]:
    """Call `method` of METHODS; "error" of the answer is None or says what failed.

    Errors become answers because one that left a worker would end the whole server.
    """
    try:
        return {"error": None, **METHODS[method](receiver(), argument)}
    except Exception as error:
        logger.error("%s failed\n%s", method, traceback.format_exc())
        return {"error": f"{type(error).__name__}: {error}"}


def _identity(receiver: Receiver, _: None) -> dict[str, Any]:
    return {"run_id": receiver.run_id, "engine": receiver.engine, "incarnation": receiver.incarnation,
            "worker": receiver.worker}


def _prepare(receiver: Receiver, request: str) -> dict[str, Any]:
    return receiver.prepare(SyncRequest.from_json(request))


def _prove(receiver: Receiver, request: str) -> dict[str, Any]:
    return receiver.prove(SyncRequest.from_json(request))


def _receive(receiver: Receiver, request: str) -> dict[str, Any]:
    return receiver.receive(SyncRequest.from_json(request))


def _forget(receiver: Receiver, _: None) -> dict[str, Any]:
    receiver.forget()
    return {}


def _scramble(receiver: Receiver, seed: str) -> dict[str, Any]:
    receiver.scramble(int(seed))
    return {}


def _fingerprint(receiver: Receiver, _: None) -> dict[str, Any]:
    return {"sums": receiver.fingerprint()}


METHODS: Mapping[str, Callable[[Receiver, Any], dict[str, Any]]] = {
    "mrl_identity": _identity,        # who the worker is: run id, engine index, incarnation, all as given at start
    "mrl_prepare": _prepare,          # Receiver.prepare of a SyncRequest in JSON
    "mrl_prove": _prove,              # Receiver.prove of a SyncRequest in JSON
    "mrl_receive": _receive,          # Receiver.receive of a SyncRequest in JSON
    "mrl_forget": _forget,            # Receiver.forget, before an engine sleeps
    "mrl_scramble": _scramble,        # Receiver.scramble of a seed, for tests
    "mrl_fingerprint": _fingerprint,  # Receiver.fingerprint, for tests
}
