"""What a node's main thread does while others serve: it feeds the watchdog, and reads the configuration on SIGHUP."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from muser_wire.notify import Watchdog
from muser_wire.process import SignalFlag

LOOK_S = 0.25
"""How often the main thread looks, in seconds."""


@dataclass(frozen=True)
class Upkeep:
    """Called from the main thread's loop. `hangup` is set by SIGHUP; `reload` acts on it."""

    watchdog: Watchdog
    hangup: SignalFlag
    reload: Callable[[], None]

    def look(self) -> None:
        """Do what is due now."""
        self.watchdog.look()
        if self.hangup.is_set():
            self.hangup.clear()
            self.reload()

    def until(self, stop: SignalFlag) -> None:
        """Return when `stop` is set; look meanwhile."""
        while not stop.wait(LOOK_S):
            self.look()


def set_log_level(level: object) -> None:
    """Log what is at least as grave as `level`: "debug", "info", "warning" or "error"."""
    logging.getLogger().setLevel(str(level).upper())
