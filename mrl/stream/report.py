"""What a push says about itself: each rank's account, and the report that all of them get."""
from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Optional


@dataclass
class Sent:
    """What one rank did in a push: seconds of gathering and of sending, the bytes that it sent (a broadcast counts once
    an engine), those of a push that sends everything, and the engines that its links lost, with the reason."""

    gather_s: float = 0.0
    send_s: float = 0.0
    bytes: int = 0
    full_bytes: int = 0
    errors: dict[int, str] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Sent":
        fields = json.loads(text)
        return cls(**{**fields, "errors": {int(engine): why for engine, why in fields["errors"].items()}})


@dataclass(frozen=True)
class PushReport:
    """How one push went. Times in seconds: whole, slowest gathering rank, slowest sender, slowest engine worker's
    copying into its parameters and its whole transfer; what of `seconds` is not `transfer_s` are calls between
    processes that do not run beside it, and what an engine does before and after. `bytes` were sent to all engines
    together, by `strategy`, the `sent_fraction` of what a push of everything sends (1.0 when there was nobody to send
    to).

    errors: by engine that took part, None when it now serves the version, else what failed. absent: by engine that
    could not take part, because it is starting, has failed or does not answer, why. verified: every engine that
    succeeded in this push had its checksums compared. unverified: HF tensors that could not be, because the engine's
    loader transforms them. again: engines that were not what they had been taken for; in no report that push returns.
    """

    version: str
    strategy: str
    seconds: float
    gather_s: float
    send_s: float
    load_s: float
    transfer_s: float
    bytes: int
    sent_fraction: float
    errors: dict[int, Optional[str]]
    absent: dict[int, str]
    verified: bool
    unverified: tuple[str, ...] = ()
    again: tuple[int, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every engine asked now serves the version."""
        return not (self.absent or self.again or any(self.errors.values()))

    def followed_by(self, other: PushReport) -> PushReport:
        """Both as one report: `other` is about the engines in `again`."""
        rounds = [one for one in (self, other) if None in one.errors.values()]
        longest = {name: max(getattr(self, name), getattr(other, name))
                   for name in ("gather_s", "send_s", "load_s", "transfer_s")}
        return replace(
            other, **longest, seconds=self.seconds + other.seconds, bytes=self.bytes + other.bytes,
            errors=self.errors | other.errors, absent=self.absent | other.absent,
            verified=bool(rounds) and all(one.verified for one in rounds),
            unverified=tuple(sorted({*self.unverified, *other.unverified})))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "PushReport":
        fields = json.loads(text)
        by_engine = {name: {int(engine): text for engine, text in fields[name].items()}
                     for name in ("errors", "absent")}
        return cls(**{**fields, **by_engine, "unverified": tuple(fields["unverified"]),
                      "again": tuple(fields["again"])})
