"""What surrounds a handoff on both nodes, without IO: tickets on the producer, a progress watch on the consumer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from muser_wire.errors import ProgressTimeout, RemoteProtocolError
from muser_wire.messages import TICKET_NBYTES

TICKET_LIFETIME_S = 10.0
"""How long an accepted handoff waits for its stream: far more than a round trip, short enough to free what it holds."""

MAX_TICKETS = 64
"""Accepted handoffs that wait at once, each with its prompt: who opens and never streams cannot fill memory."""

CHUNK_TIME_FACTOR = 3.0
"""A producer is frozen when nothing came for this many predicted chunk times, and the grace on top."""

PROGRESS_GRACE_S = 2.0
"""Added to the progress bound, in seconds: round trips, scheduling, a prediction that was a little off."""

MAX_PROGRESS_BOUND_S = 900.0
"""What a peer's predictions can make a consumer wait at most, in seconds, between two frames."""

T = TypeVar("T")


@dataclass(frozen=True)
class _Waiting(Generic[T]):
    value: T
    expires_s: float


class TicketTable(Generic[T]):
    """Accepted handoffs that wait for their stream. A ticket works once and for a short time [5.5].

    `now_s` is any monotonic time in seconds, the same for every call. `on_expire` gets each value
    whose ticket was not used in time.
    """

    def __init__(self, on_expire: Callable[[T], None] = lambda value: None) -> None:
        self._on_expire = on_expire
        self._waiting: dict[bytes, _Waiting[T]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def issue(self, value: T, now_s: float, entropy: bytes) -> bytes | None:
        """Return a ticket for `value`, or None when too many wait. `entropy` is 32 fresh random bytes."""
        self.expire(now_s)
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
        self.expire(now_s)
        waiting = self._waiting.pop(ticket, None)
        if waiting is None:
            raise RemoteProtocolError("the ticket is unknown, already used or expired")
        return waiting.value

    def expire(self, now_s: float) -> None:
        """Void every ticket that is too old."""
        for ticket in [t for t, waiting in self._waiting.items() if waiting.expires_s <= now_s]:
            self._on_expire(self._waiting.pop(ticket).value)


class ProgressWatch:
    """Tells whether the producer makes progress, not only whether it is connected [5.7].

    Until the first segment, the time that the producer expected to wait for others counts as well.
    """

    def __init__(self, predicted_chunk_s: float, predicted_wait_s: float, now_s: float) -> None:
        self._chunk_s = predicted_chunk_s
        self.bound_s = self._bound(predicted_wait_s)
        self._last_s = now_s

    def progress(self, now_s: float) -> None:
        """Note that a frame came, or that this side is the one that waits."""
        self._last_s = now_s

    def computing(self) -> None:
        """Note that the first segment came: the producer waits for nobody any more."""
        self.bound_s = self._bound(0.0)

    def check(self, now_s: float) -> None:
        """Raise when the bound has passed without a frame.

        Raises:
            ProgressTimeout: it has; the message names the bound.
        """
        if now_s - self._last_s > self.bound_s:
            raise ProgressTimeout(f"no frame came for {self.bound_s:.1f} s")

    def _bound(self, wait_s: float) -> float:
        return min(MAX_PROGRESS_BOUND_S, CHUNK_TIME_FACTOR * (wait_s + self._chunk_s) + PROGRESS_GRACE_S)
