"""What the producer tells of its work while it works: the contract with whoever counts it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Computed:
    """One handoff's computation, ended well: `waited_s` of its `seconds` went to a reader that was slower."""

    tokens: int
    reused_tokens: int
    seconds: float
    waited_s: float


@dataclass(frozen=True)
class Sent:
    """One handoff's stream, ended: `code` is "sealed", an abort's code, or "gone" when the reader left first."""

    code: str
    segments: int
    payload_nbytes: int
    seconds: float


class Observer(Protocol):
    """Called on whatever thread did the work; must not block, and must not raise."""

    def accepted(self) -> None:
        """Note that a handoff was accepted."""

    def refused(self, code: str) -> None:
        """Note that a handoff was refused, with its stable code [5.6]."""

    def computed(self, computed: Computed) -> None:
        """Note that a prompt was computed."""

    def sent(self, sent: Sent) -> None:
        """Note that a stream ended."""


class Unobserved:
    """See `Observer`: counts nothing."""

    def accepted(self) -> None:
        """See `Observer`."""

    def refused(self, code: str) -> None:
        """See `Observer`."""

    def computed(self, computed: Computed) -> None:
        """See `Observer`."""

    def sent(self, sent: Sent) -> None:
        """See `Observer`."""
