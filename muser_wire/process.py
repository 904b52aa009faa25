"""What a node's process does beside its work: log lines, the ready file, the signals that end it."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def configure_logging(level: str) -> None:
    """Send log lines to stderr: an event name, then ids, sizes and durations; never a prompt, a token or a key."""
    logging.basicConfig(stream=sys.stderr, level=level.upper(), format=LOG_FORMAT)


def write_ready_file(path: Path, facts: dict[str, object]) -> None:
    """Publish, whole or not at all, that this process serves: its pid and `facts` as one JSON object."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps({"pid": os.getpid(), **facts}), encoding="utf-8")
    os.replace(temporary, path)


def stop_on_signals() -> threading.Event:
    """Return an event that SIGTERM and SIGINT set. Call on the main thread."""
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    return stop
