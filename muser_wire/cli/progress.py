"""Progress of a fetch on a terminal: a bar that redraws itself, or a line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

BAR_CELLS = 30
REDRAW_S = 0.1
# In a log, a line this often shows that the work goes on.
LINE_S = 5.0


class Meter:
    """Writes what a fetch says to `out`; `now` gives seconds that only grow."""

    def __init__(self, out: TextIO, now: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._now = now
        self._tty = out.isatty()
        self._what: str | None = None
        self._written_at = now()

    def note(self, text: str) -> None:
        """Write one line."""
        print(text, file=self._out, flush=True)

    def bytes_done(self, what: str, done: int, total: int) -> None:
        """Show how far a step is; the last call of a step, with done == total, ends its line."""
        starts = what != self._what
        ends = done >= total
        now = self._now()
        if not (starts or ends) and now - self._written_at < (REDRAW_S if self._tty else LINE_S):
            return
        self._written_at = now
        self._what = None if ends else what
        if self._tty:
            self._draw(what, done, total, end="\n" if ends else "")
        elif not starts or ends:
            self.note(f"{what}: {_megabytes(done)} of {_megabytes(total)}")

    def _draw(self, what: str, done: int, total: int, end: str) -> None:
        filled = BAR_CELLS * done // max(total, 1)
        bar = "#" * filled + "." * (BAR_CELLS - filled)
        print(f"\r{what:<20} [{bar}] {_megabytes(done)} of {_megabytes(total)}", end=end, file=self._out, flush=True)


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"
