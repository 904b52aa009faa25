"""Types of command-line flags: each checks a value's range, so that argparse refuses a bad one by the flag's name."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

MAX_PORT = 65535
MAX_SECONDS = 86_400.0


def port(text: str) -> int:
    """Return a TCP port, 0 to 65535; 0 lets the system choose."""
    return whole(0, MAX_PORT)(text)


def whole(least: int, most: int) -> Callable[[str], int]:
    """Return the type of a whole number in least..most.

    >>> whole(1, 8)("8")
    8
    """

    def parse(text: str) -> int:
        if text.isascii() and text.isdigit() and least <= int(text) <= most:
            return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")

    return parse


def seconds(text: str) -> float:
    """Return a duration in seconds, 0 to a day."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to {MAX_SECONDS:.0f}")
    return value


def new_file(text: str) -> Path:
    """Return the path of a file to write, whose folder must be there."""
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {path.parent} is not a folder, or it is one")
    return path
