"""The other end of NOTIFY_SOCKET: a datagram socket that takes what a node tells systemd."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path


class Listener:
    """Receives messages at `path`; `environment` is what a service's process is given."""

    def __init__(self, path: Path, watchdog_s: float | None = None) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self.environment = {"NOTIFY_SOCKET": str(path)}
        if watchdog_s is not None:
            self.environment["WATCHDOG_USEC"] = str(int(watchdog_s * 1e6))
        self.heard: list[dict[str, str]] = []

    def next(self, timeout_s: float) -> dict[str, str] | None:
        """The next message, by name; None when none came in time."""
        self._socket.settimeout(max(timeout_s, 1e-3))
        try:
            lines = self._socket.recv(65536).decode().split("\n")
        except TimeoutError:
            return None
        message = dict(line.split("=", 1) for line in lines)
        self.heard.append(message)
        return message

    def until(self, wanted: Callable[[dict[str, str]], bool], timeout_s: float) -> dict[str, str]:
        """The first message that is `wanted`; fails when none was in time."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            message = self.next(left)
            if message is not None and wanted(message):
                return message
        raise AssertionError(f"not told within {timeout_s} s; heard {self.heard[-5:]}")

    def drain(self) -> None:
        """Take what lies there already."""
        while self.next(0.0) is not None:
            pass

    def close(self) -> None:
        self._socket.close()
