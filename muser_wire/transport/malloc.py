"""glibc's malloc thresholds, raised so that the frames' memory is reused.

By default glibc maps, faults in and unmaps every message of 1 MiB; measured, that is half of a
receiver's cost. Linux with glibc only; elsewhere nothing happens.
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_THRESHOLD = -3

THRESHOLDS = {
    M_MMAP_THRESHOLD: 32 << 20,
    M_TRIM_THRESHOLD: 1 << 30,
    M_TOP_PAD: 64 << 20,
}
"""Bytes: the largest that glibc accepts for mappings, and enough slack to keep frames in flight on the heap."""


def raise_malloc_thresholds() -> bool:
    """Raise the thresholds; return whether glibc took all of them."""
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(mallopt(parameter, value) == 1 for parameter, value in THRESHOLDS.items())
