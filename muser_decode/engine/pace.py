"""How many prompt tokens this node computes at a time, so that others wait only so long."""

from __future__ import annotations

UNIT_TOKENS = 128
"""The least: attention computes so many rows of queries together, and matrices lose speed below it."""

SHARED_S = 0.1
"""What one unit shall take at most while others get tokens, in seconds: a reader hardly sees the gap."""

ALONE_S = 1.0
"""The same while nobody gets tokens: a request that comes now waits so long at most."""

WEIGHT = 0.5
"""Of the newest measurement, in the mean."""

LEAST_REST = 64
"""A chunk's rest that is not longer goes with the unit before it: so few rows are another kernel's."""


class Pace:
    """Measures the seconds that a token takes here. Units end on multiples of UNIT_TOKENS or with their chunk."""

    def __init__(self) -> None:
        self._token_s: float | None = None

    def learn(self, tokens: int, seconds: float) -> None:
        """Take note of a unit."""
        # What takes no time on this clock would make the next unit infinitely large.
        token_s = max(seconds, 1e-9) / tokens
        self._token_s = token_s if self._token_s is None else WEIGHT * token_s + (1.0 - WEIGHT) * self._token_s

    def unit_stop(self, start: int, stop: int, *, shared: bool) -> int:
        """Return where a unit ends that begins at `start`, at `stop` at the latest."""
        most = UNIT_TOKENS
        if self._token_s is not None:
            while most < stop - start and 2 * most * self._token_s <= (SHARED_S if shared else ALONE_S):
                most *= 2
        end = (start + most) // UNIT_TOKENS * UNIT_TOKENS
        return stop if end <= start or stop - end <= LEAST_REST else end
