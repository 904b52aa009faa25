"""Blocks that were held and are not any more, and why: so that a miss can be explained.

A bounded list of names. Beside files on disk it is kept there too, one line a block, over restarts. Nothing but
explanations depends on it, so a list that cannot be read or written is no error.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

from muser_wire.identities import Digest
from muser_wire.kvpack.files import Files

DEPARTED_FILE = "departed"
MAX_DEPARTED = 4096
"""Names that are remembered: 140 bytes each."""


class Departure(Enum):
    """Why a block is not held any more."""

    EVICTED = "evicted for newer blocks"
    DAMAGED = "failed a check and was deleted"
    UNSAVED = "could not be saved on disk"
    STRANDED = "deleted with the block before it"


@dataclass(frozen=True)
class Departed:
    """What left, what it continued, and why."""

    name: Digest
    parent: Digest
    reason: Departure


class Departures:
    """The last blocks that left; thread-safe. `files` None: it is kept in memory alone."""

    def __init__(self, files: Files | None = None) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._by_name: OrderedDict[Digest, Departed] = OrderedDict()
        self._lines = 0
        for departed in read_departed(files) if files is not None else ():
            self._remember(departed)
            self._lines += 1

    def note(self, name: Digest, parent: Digest, reason: Departure) -> None:
        """Remember why a block left."""
        departed = Departed(name, parent, reason)
        with self._lock:
            self._remember(departed)
            if self._files is not None:
                with contextlib.suppress(OSError):
                    self._write(self._files, departed)

    def why(self, name: Digest) -> Departure | None:
        """Return why a block left, or None if it never did."""
        with self._lock:
            departed = self._by_name.get(name)
        return departed.reason if departed else None

    def after(self, parent: Digest) -> Departure | None:
        """Return why the last block that continued `parent` left, or None if none ever did."""
        with self._lock:
            last = [departed.reason for departed in self._by_name.values() if departed.parent == parent][-1:]
        return last[0] if last else None

    def _write(self, files: Files, departed: Departed) -> None:
        if self._lines >= 2 * MAX_DEPARTED:
            files.write(DEPARTED_FILE, [b"".join(map(_line, self._by_name.values()))])
            self._lines = len(self._by_name)
        else:
            files.append(DEPARTED_FILE, _line(departed))
            self._lines += 1

    def _remember(self, departed: Departed) -> None:
        self._by_name.pop(departed.name, None)
        self._by_name[departed.name] = departed
        if len(self._by_name) > MAX_DEPARTED:
            self._by_name.popitem(last=False)


def read_departed(files: Files) -> list[Departed]:
    """Return what a directory's list says, the oldest first. Lines that say nothing are left out."""
    found = []
    with contextlib.suppress(OSError):
        for line in files.read(DEPARTED_FILE).splitlines():
            # KeyError: a reason that only another version knows.
            with contextlib.suppress(ValueError, KeyError):
                name, parent, reason = line.decode("ascii").split(" ")
                found.append(Departed(Digest(bytes.fromhex(name)), Digest(bytes.fromhex(parent)), Departure[reason]))
    return found


def _line(departed: Departed) -> bytes:
    return f"{departed.name.hex()} {departed.parent.hex()} {departed.reason.name}\n".encode("ascii")
