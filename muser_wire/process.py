"""What a node's process does beside its work: the ready file, the signals that end it."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from types import FrameType

from muser_wire.errors import WireError
from muser_wire.private_files import publish


class ReadyFileError(WireError):
    """The ready file cannot be written. The message names it."""

    code = "ready_file"


def write_ready_file(path: Path, facts: dict[str, object]) -> None:
    """Publish, whole or not at all, that this process serves: its pid and `facts` as one JSON object.

    Raises:
        ReadyFileError: it cannot be written.
    """
    try:
        publish(path, json.dumps({"pid": os.getpid(), **facts}).encode())
    except OSError as error:
        raise ReadyFileError(f"--ready-file {path} cannot be written: {error.strerror or error}") from error


def stop_on_signals() -> threading.Event:
    """Return an event that SIGTERM and SIGINT set. Call on the main thread."""
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    return stop


def reload_on_hangup(stop: threading.Event) -> threading.Event:
    """Return an event that SIGHUP sets: read the configuration again. Call on the main thread.

    SIGHUP is also what a terminal sends when it is closed. Then a node that was started in it ends as with SIGTERM,
    and does not go on out of sight; under nohup it goes on as it was.
    """
    reload = threading.Event()
    in_terminal = _has_terminal()
    under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

    def handle(number: int, frame: FrameType | None) -> None:
        if not in_terminal or _has_terminal():
            reload.set()
        elif not under_nohup:
            stop.set()

    signal.signal(signal.SIGHUP, handle)
    return reload


def _has_terminal() -> bool:
    """Say whether this process has a controlling terminal that is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
