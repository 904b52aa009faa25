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


class SignalFlag:
    """What a signal's handler sets while the thread that it interrupts waits for it. One thread waits.

    Not threading.Event: its `set` takes a lock that the interrupted `wait` may hold at that moment, and then the thread
    waits for itself for ever. Nor queue.SimpleQueue: in Python 3.11 a `get` that a signal interrupts at the end of its
    time never returns.
    """

    def __init__(self) -> None:
        self._is_set = False
        # Held, but between a `set` and the end of the wait that it wakes, or the next `clear`.
        self._asleep = threading.Lock()
        self._asleep.acquire()

    def set(self) -> None:
        """Set it, and wake who waits."""
        if not self._is_set:
            self._is_set = True
            if self._asleep.locked():
                self._asleep.release()

    def clear(self) -> None:
        """Forget that it was set. One that is set meanwhile stays so."""
        self._is_set = False
        self._asleep.acquire(blocking=False)

    def is_set(self) -> bool:
        """Say whether it is set."""
        return self._is_set

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is set, for at most so many seconds; say whether it is."""
        if not self._is_set:
            self._asleep.acquire(timeout=timeout_s)
        return self._is_set


def stop_on_signals() -> SignalFlag:
    """Return a flag that SIGTERM and SIGINT set. Call on the main thread."""
    stop = SignalFlag()

    def handle(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    return stop


def reload_on_hangup(stop: SignalFlag) -> SignalFlag:
    """Return a flag that SIGHUP sets: read the configuration again. Call on the main thread.

    SIGHUP is also what a terminal sends when it is closed. Then a node that was started in it ends as with SIGTERM,
    and does not go on out of sight; under nohup it goes on as it was.
    """
    reload = SignalFlag()
    in_terminal = _has_terminal()
    under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

    def handle(number: int, frame: FrameType | None) -> None:
        if not in_terminal or _has_terminal():
            reload.set()
        elif not under_nohup:
            stop.set()

    signal.signal(signal.SIGHUP, handle)
    return reload


@contextlib.contextmanager
def interruptions_held() -> Iterator[None]:
    """Hold back, until the block ends, the signals whose handlers may raise.

    For a block that starts a process and takes note of it: an exception between the two would leave it running. Signals
    that nothing handles, or that are ignored, stay so; beside the main thread, where no handler runs, nothing is done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    found = {number: signal.getsignal(number) for number in INTERRUPTIONS}
    before = {number: handler for number, handler in found.items() if callable(handler)}
    held: list[signal.Signals] = []
    holding = True

    def hold(number: int, frame: FrameType | None) -> None:
        # A handler that raises while the others are put back leaves this one in their place.
        if holding:
            held.append(signal.Signals(number))
        else:
            before[signal.Signals(number)](number, frame)

    # Not the kernel's mask: what is started in the block would inherit it.
    try:
        for number in before:
            signal.signal(number, hold)
        yield
    finally:
        holding = False
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in held:
            signal.raise_signal(number)


def _has_terminal() -> bool:
    """Say whether this process has a controlling terminal that is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
