"""What a node tells systemd: ready, alive, on its way out, over the socket that NOTIFY_SOCKET names.

Without that variable everything here does nothing, so a start by hand is no other than a service's. The
messages are those of sd_notify(3); each is one datagram of lines NAME=VALUE.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping

EXTEND_EVERY_S = 10.0
EXTEND_BY_S = 60.0
"""While a model is loaded, how often systemd is asked for more time, and for how much, in seconds."""

LOAD_LIMIT_S = 3600.0
"""When loading counts as stuck, whatever it does: the largest models read from a slow disk take minutes."""

MIN_CPU_S = 0.01
"""Less processor time than this between two looks, in seconds: loading does not go on."""

FEEDS_PER_INTERVAL = 4
"""How often a watchdog is fed at most in each of its intervals; it asks for once."""

_log = logging.getLogger(__name__)


class Notifier:
    """Sends messages to whoever started this process, if he listens."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        # An abstract socket's name begins with a zero byte, which a variable cannot hold.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.watchdog_s = _watchdog_s(environment) if address else None
        """How long the watchdog waits for a sign of life, in seconds; None: nobody waits."""

    def ready(self, status: str) -> None:
        """Say that requests are answered from now on, or again after a reload."""
        self._send("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """Say that the configuration is read again; `ready` ends it."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, drain_s: float, status: str) -> None:
        """Say that the process drains, and ask for the `drain_s` seconds that it may take."""
        self._send("STOPPING=1", f"EXTEND_TIMEOUT_USEC={_usec(drain_s)}", f"STATUS={status}")

    def extend(self, seconds: float, status: str) -> None:
        """Ask for `seconds` more from now on before a start counts as failed."""
        self._send(f"EXTEND_TIMEOUT_USEC={_usec(seconds)}", f"STATUS={status}")

    def alive(self) -> None:
        """Feed the watchdog."""
        self._send("WATCHDOG=1")

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        message = "\n".join(line.replace("\n", " ") for line in lines).encode()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | getattr(socket, "SOCK_CLOEXEC", 0)) as sender:
                sender.sendto(message, self._address)
        except OSError as error:
            # Nobody can be told otherwise; who waits for the message acts by himself.
            _log.warning("notify_failed reason=%s", error.strerror or error)


class Watchdog:
    """Feeds systemd's watchdog with the engine's progress: what does not move is not called alive.

    `progress` returns anything that is another value whenever the engine has got on.
    """

    def __init__(self, notifier: Notifier, progress: Callable[[], float], now: Callable[[], float] = time.monotonic):
        self._notifier = notifier
        self._progress = progress
        self._now = now
        self._seen: float | None = None
        self._fed_s = 0.0

    def look(self) -> None:
        """Feed, if the engine has got on since the last feeding and that is not just now. Call often."""
        interval_s = self._notifier.watchdog_s
        if interval_s is None or self._now() - self._fed_s < interval_s / FEEDS_PER_INTERVAL:
            return
        progress = self._progress()
        if progress != self._seen:
            self._seen, self._fed_s = progress, self._now()
            self._notifier.alive()


def cpu_seconds() -> float:
    """Return the processor time that this process and the children it waited for have used, in seconds."""
    return sum(os.times()[:4])


@contextlib.contextmanager
def more_time_to_load(
    notifier: Notifier,
    what: str,
    *,
    every_s: float = EXTEND_EVERY_S,
    used_s: Callable[[], float] = cpu_seconds,
) -> Iterator[None]:
    """Ask for more time inside the block, at once and then again as long as the process computes.

    A start that hangs gets none: it fails after the time that it was given last.
    """
    done = threading.Event()

    def ask() -> None:
        started_s, before_s = time.monotonic(), used_s()
        while not done.wait(every_s) and time.monotonic() - started_s < LOAD_LIMIT_S:
            used = used_s()
            if used - before_s >= MIN_CPU_S:
                notifier.extend(EXTEND_BY_S, f"{what}, {time.monotonic() - started_s:.0f} s so far")
            before_s = used

    notifier.extend(EXTEND_BY_S, what)
    thread = threading.Thread(target=ask, name="notify-loading", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _usec(seconds: float) -> int:
    return int(seconds * 1_000_000)


def _watchdog_s(environment: Mapping[str, str]) -> float | None:
    """Return the watchdog's interval, if one is set and for this process."""
    usec, pid = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
    if not usec.isdigit() or int(usec) == 0 or pid not in ("", str(os.getpid())):
        return None
    return int(usec) / 1_000_000
