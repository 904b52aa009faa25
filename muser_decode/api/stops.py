"""Stop strings, found in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Releases text up to the first stop string, whatever pieces the text arrives in.

    The first stop string is the one that is complete first; of two that end together, the longer.
    Text that may be the head of a stop string is held until the next piece decides.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""
        self.found: str | None = None
        self.removed = 0
        """Characters from the stop string's first on, once it matched."""

    def feed(self, text: str) -> str:
        """Return the text that is certain not to belong to a stop string; nothing more after a match."""
        if self.matched:
            return ""
        pending = self._held + text
        match = self._first_match(pending)
        if match is not None:
            cut, self.found = match
            self.removed = len(pending) - cut
            self._held = ""
            return pending[:cut]
        keep = self._undecided(pending)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    @property
    def matched(self) -> bool:
        """Whether a stop string was found."""
        return self.found is not None

    @property
    def held(self) -> int:
        """Characters that wait for a decision."""
        return len(self._held)

    def finish(self) -> str:
        """Return what was held for a match that did not come."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """Return where the first complete stop string begins, and which it is."""
        starts = ((text.find(stop), stop) for stop in self._stops)
        ends = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        return min(ends)[1:] if ends else None

    def _undecided(self, text: str) -> int:
        """Return the length of the longest tail that begins a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
