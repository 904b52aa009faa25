"""What a process does beside its work: the ready file, the signals that end it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from muser_wire.errors import WireError
from muser_wire.private_files import publish

INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals by which a user, a service manager and a closed terminal end a process."""


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


@contextlib.contextmanager
def interruptions_held() -> Iterator[None]:
    """Hold back, until the block ends, the signals whose handlers may raise.

    For a block that starts a process and takes note of it: an exception between the two would leave it running. Signals
    that nothing handles, or that are ignored, stay so; beside the main thread, where no handler runs, nothing is done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        held.append(number)

    # Not the kernel's mask: what is started in the block would inherit it.
    before = {number: signal.signal(number, hold) for number in INTERRUPTIONS if callable(signal.getsignal(number))}
    try:
        yield
    finally:
        for signal_number, handler in before.items():
            signal.signal(signal_number, handler)
        for number in held:
            signal.raise_signal(number)


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
