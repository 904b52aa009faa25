"""Pacing: an upper bound on the rate at which a producer's frames leave [5.10].

A token bucket in the form of time: it knows when the next frame may leave. A sender that comes a little
late catches up. One that paused gets no credit for it: that would be a burst, which pacing is there to avoid.
"""

from __future__ import annotations

CREDIT_S = 0.02
"""The longest lateness that is made up for, in seconds: what a busy processor makes of a wait."""


class Pacer:
    """Spaces frames to `max_rate` bytes a second; 0 never waits. `now_s` is monotonic time in seconds."""

    def __init__(self, max_rate: float) -> None:
        self._max_rate = max_rate
        self._due_s = 0.0

    def delay_s(self, nbytes: int, now_s: float) -> float:
        """Return how long to wait, in seconds, before a frame of `nbytes` leaves; it is counted as sent.

        >>> pacer = Pacer(max_rate=1000.0)
        >>> [round(pacer.delay_s(100, now_s=5.0), 3) for _ in range(3)]
        [0.0, 0.1, 0.2]
        """
        if not self._max_rate:
            return 0.0
        if now_s - self._due_s > CREDIT_S:
            self._due_s = now_s
        delay_s = max(0.0, self._due_s - now_s)
        self._due_s += nbytes / self._max_rate
        return delay_s
