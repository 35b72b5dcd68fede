"""The types that cross between an engine and the rest of mrl: versions, requests, completions, status, errors.

Nothing here knows which engine serves, and nothing here needs more than the standard library, so every part may
import it.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Optional

if TYPE_CHECKING:
    import numpy as np


MemoryPart = Literal["weights", "kv_cache"]
"""What a sleeping engine takes back one after the other."""


class Version(NamedTuple):
    """A weight version, ordered as a pair: a restarted gang (higher attempt) is newer than any step before it."""

    attempt: int
    step: int

    def __str__(self) -> str:
        return f"{self.attempt}:{self.step}"

    @classmethod
    def parse(cls, text: str) -> "Version":
        """The inverse of str(). ValueError when `text` is not "attempt:step"."""
        attempt, separator, step = text.partition(":")
        if not separator or not attempt.isdigit() or not step.isdigit():
            raise ValueError(f"weight version {text!r} is not of the form 'attempt:step'")
        return cls(int(attempt), int(step))


@dataclass(frozen=True)
class GenerateRequest:
    """One sequence to sample: token ids in, token ids out.

    The log-probabilities that come back are those of the distribution sampled from, with `temperature` applied.
    Temperature 0 is greedy decoding. `at_least`: the oldest weights that may answer; None: any that are served.
    """

    prompt_ids: list[int]
    seed: int
    max_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    at_least: Optional[Version] = None


@dataclass(frozen=True)
class Completion:
    """What was sampled. `token_ids` and `log_probs` have one entry a sampled token, an end-of-sequence token included.

    `experts`, with trainer.moe_routing replay: int16 [prompt and sampled tokens - 1, layers with experts, experts a
    token], those that each token but the last went to.

    `finish_reason` "length" means cut off at max_tokens. A request that was aborted half way has no completion.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: Literal["stop", "length"]
    version: Version
    experts: Optional[np.ndarray] = None


class EngineLost(RuntimeError):
    """The engine died or hung with this request in flight (or has failed for good): ask again, elsewhere or later."""


class EngineChanged(EngineLost):
    """The engine is another, or none, than the one that a sync was meant for; nothing was done. Ask for its status."""


class EngineClosed(RuntimeError):
    """The gate let nothing through: the engine holds no committed weights, or too old ones, or is about to receive
    others, or requests were aborted. Ask again later."""


class SyncError(RuntimeError):
    """A weight sync was refused or broke off. The message says whether the engine still serves what it had."""


class EngineStartError(RuntimeError):
    """The engine server could not be started; the message has the key to look at, or the end of the server's log."""


@dataclass(frozen=True)
class Prepared:
    """One engine's answer to the plan of a new link.

    not_sharded: HF tensors that it cannot take as shards, with the reason. Empty: it stands ready for the sync. Else it
    wants another plan, in which they travel whole.
    """

    not_sharded: dict[str, str]


@dataclass(frozen=True)
class SyncResult:
    """One engine's account of a sync that was committed.

    Seconds are those of the slowest worker: waiting for bytes (`receive_s`), putting them in place (`apply_s`),
    and all from when it began to receive to the last byte in place (`transfer_s`), in which these two overlap.
    `drain_s`: waiting for requests in flight. `unverified`: HF tensors whose place in the engine is not known, so that
    their checksums could not be compared; only filled in when `verified`.
    """

    verified: bool
    drain_s: float
    receive_s: float
    apply_s: float
    transfer_s: float
    unverified: tuple[str, ...] = ()


@dataclass(frozen=True)
class EngineStatus:
    """What an engine says about itself. `incarnation` counts server starts; weights do not survive one.

    An engine that is asleep holds no memory of its GPUs, or not all; with a `version`, only the cache is missing.

    `world_size` is the number of its workers that receive weights, each with a rank of its own on every link.
    """

    index: int
    incarnation: int
    state: Literal["starting", "asleep", "dirty", "serving", "failed"]
    version: Optional[Version]
    outstanding_tokens: int
    error: Optional[str]
    world_size: int
