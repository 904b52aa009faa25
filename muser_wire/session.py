"""What surrounds a handoff on both nodes, without IO: tickets on the producer, a progress watch on the consumer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from muser_wire.errors import ProgressTimeout, RemoteProtocolError
from muser_wire.messages import TICKET_NBYTES

TICKET_LIFETIME_S = 10.0
"""How long an accepted handoff waits for its stream: far more than a round trip, short enough to free what it holds."""

MAX_TICKETS = 1024
"""Accepted handoffs that wait at once; a consumer that opens and never streams cannot fill memory."""

CHUNK_TIME_FACTOR = 3.0
"""A producer is frozen when nothing came for this many predicted chunk times, and the grace on top."""

PROGRESS_GRACE_S = 2.0
"""Added to the progress bound, in seconds: round trips, scheduling, a prediction that was a little off."""

T = TypeVar("T")


@dataclass(frozen=True)
class _Waiting(Generic[T]):
    value: T
    expires_s: float


class TicketTable(Generic[T]):
    """Accepted handoffs that wait for their stream. A ticket works once and for a short time [5.5].

    `now_s` is any monotonic time in seconds, the same for every call.
    """

    def __init__(self) -> None:
        self._waiting: dict[bytes, _Waiting[T]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def issue(self, value: T, now_s: float, entropy: bytes) -> bytes | None:
        """Return a ticket for `value`, or None when too many wait. `entropy` is 32 fresh random bytes."""
        self._expire(now_s)
        if len(self._waiting) >= MAX_TICKETS:
            return None
        ticket = entropy[:TICKET_NBYTES]
        self._waiting[ticket] = _Waiting(value, now_s + TICKET_LIFETIME_S)
        return ticket

    def redeem(self, ticket: bytes, now_s: float) -> T:
        """Return what the ticket stands for; it is void from now on.

        Raises:
            RemoteProtocolError: the ticket is unknown, used or too old.
        """
        self._expire(now_s)
        waiting = self._waiting.pop(ticket, None)
        if waiting is None:
            raise RemoteProtocolError("the ticket is unknown, already used or expired")
        return waiting.value

    def _expire(self, now_s: float) -> None:
        for ticket in [t for t, waiting in self._waiting.items() if waiting.expires_s <= now_s]:
            del self._waiting[ticket]


class ProgressWatch:
    """Tells whether the producer makes progress, not only whether it is connected [5.7]."""

    def __init__(self, predicted_chunk_s: float, now_s: float) -> None:
        self.bound_s = CHUNK_TIME_FACTOR * predicted_chunk_s + PROGRESS_GRACE_S
        self._last_s = now_s

    def progress(self, now_s: float) -> None:
        """Note that a verified frame came."""
        self._last_s = now_s

    def check(self, now_s: float) -> None:
        """Raise when the bound has passed without a frame.

        Raises:
            ProgressTimeout: it has; the message names the bound.
        """
        if now_s - self._last_s > self.bound_s:
            raise ProgressTimeout(f"no frame came for {self.bound_s:.1f} s")
