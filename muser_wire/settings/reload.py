"""Reading the configuration again in a running node: what can change does, the rest is named, a bad file is refused."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from muser_wire.errors import WireError
from muser_wire.notify import Notifier
from muser_wire.settings.settings import Settings

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Changes:
    """What a running node can take in. Each function may raise a `WireError`; what it had before then stays.

    `check` refuses values that do not fit together. `live` has, by key, what takes a new value. `refresh` has, by a
    name for the log, what reads files that the configuration names or that lie in MUSER_HOME.
    """

    check: Callable[[argparse.Namespace], object]
    live: Mapping[str, Callable[[object], None]]
    refresh: Mapping[str, Callable[[], None]]


class Reloader:
    """Reads the settings again at each call. `values` are those that the node was started with."""

    def __init__(self, settings: Settings, values: argparse.Namespace, changes: Changes, notifier: Notifier) -> None:
        self._settings = settings
        self._in_effect = vars(values).copy()
        self._changes = changes
        self._notifier = notifier

    def __call__(self) -> None:
        """Read, apply, and log what was applied and what needs a restart. Nothing is raised."""
        self._notifier.reloading()
        try:
            read = self._settings.read()
            wanted = read.namespace()
            self._changes.check(wanted)
        except WireError as error:
            _log.error("config_kept reason=%s", error)
        else:
            self._take(vars(wanted))
        for name, refresh in self._changes.refresh.items():
            self._try(name, refresh)
        _log.info("config_read_again")
        self._notifier.ready("serving")

    def _take(self, wanted: Mapping[str, object]) -> None:
        live = self._changes.live
        changed = [name for name, value in wanted.items() if value != self._in_effect[name]]
        for name in changed:
            if name in live and self._try(name, partial(live[name], wanted[name])):
                self._in_effect[name] = wanted[name]
                _log.info("config_changed key=%s", name)
        waiting = [name for name in changed if name not in live]
        if waiting:
            _log.warning("config_needs_restart keys=%s", ",".join(waiting))

    @staticmethod
    def _try(name: str, change: Callable[[], None]) -> bool:
        try:
            change()
        except WireError as error:
            _log.error("config_kept key=%s reason=%s", name, error)
            return False
        return True
