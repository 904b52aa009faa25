"""How much memory this process has."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

STATM = Path("/proc/self/statm")
"""Linux: sizes of this process, in pages; the second one is what is resident."""

UNIT_NBYTES = 1 if sys.platform == "darwin" else 1024
"""The unit in which the system counts a process's peak: getrusage(2)."""


def resident_nbytes() -> int | None:
    """Return the resident memory of this process, in bytes; None where the system does not say it simply."""
    try:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def peak_nbytes() -> int:
    """Return the most memory that was ever resident in this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT_NBYTES
