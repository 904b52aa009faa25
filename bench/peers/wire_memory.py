"""Memory that the peers of the wire benchmark send from and receive into. Standard library and numpy only."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

MEMORY_NBYTES = 128 << 20
"""As much as our own source reads from; longer transfers go over it again."""


def source_memory() -> np.ndarray:
    """Return noise; written, so no page is faulted in while the clock runs."""
    return np.random.default_rng(7).integers(0, 256, MEMORY_NBYTES, dtype=np.uint8)


def sink_memory() -> np.ndarray:
    """Return memory of other content than any source's."""
    return np.full(MEMORY_NBYTES, 1, np.uint8)


def pieces(nbytes: int, most: int = MEMORY_NBYTES) -> Iterator[tuple[int, int]]:
    """Yield (offset, size) of a transfer that wraps around the memory, `most` bytes at a time."""
    at, left = 0, nbytes
    while left:
        size = min(left, most, MEMORY_NBYTES - at)
        yield at, size
        at, left = (at + size) % MEMORY_NBYTES, left - size


def digest(memory: np.ndarray, nbytes: int) -> dict[str, Any]:
    """Return what both sides must agree on after a transfer of `nbytes`."""
    return {"digest": hashlib.sha256(memory[:nbytes]).hexdigest()}


def timed(receive: Callable[[int], None], nbytes: int) -> dict[str, Any]:
    """Return how long one transfer took, by the clock and on this side's processor."""
    cpu_s, started = time.process_time(), time.perf_counter()
    receive(nbytes)
    return {"seconds": time.perf_counter() - started, "cpu_s": time.process_time() - cpu_s, "nbytes": nbytes}


def cpu() -> dict[str, Any]:
    """Return this process's processor time so far, in seconds."""
    return {"cpu_s": time.process_time()}
