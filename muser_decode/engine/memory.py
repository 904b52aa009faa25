"""The memory that caches of keys and values may take, and who has how much of it.

A request takes its whole need, prompt and longest answer, before it begins: it never fails half way for lack of
memory. What is kept of earlier requests lives in what is left, and gives way.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from muser_decode.numerics import on_gpu

log = logging.getLogger(__name__)

RESERVE_NBYTES = 1 << 30
"""Left to the rest of the process and the machine, and to what computing a chunk needs for a moment."""

RESERVE_SHARE = 8
"""Of a large machine this part is left, where it is more."""

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""Where a container's limit stands."""


class CacheMemory:
    """`total_nbytes` for caches. `yield_to` is told how much requests leave to whatever else is kept."""

    def __init__(self, total_nbytes: int, yield_to: Callable[[int], None] | None = None) -> None:
        self.total_nbytes = total_nbytes
        self._taken_nbytes = 0
        self._yield_to = yield_to

    @property
    def free_nbytes(self) -> int:
        """What no request has taken."""
        return self.total_nbytes - self._taken_nbytes

    def take(self, nbytes: int) -> bool:
        """Take memory, which is then free of anything kept; return False when requests leave too little."""
        if nbytes > self.free_nbytes:
            return False
        self._taken_nbytes += nbytes
        self._tell()
        return True

    def give_back(self, nbytes: int) -> None:
        """Give back what was taken."""
        self._taken_nbytes -= nbytes
        self._tell()

    def _tell(self) -> None:
        if self._yield_to is not None:
            self._yield_to(self.free_nbytes)


def machine_nbytes() -> int:
    """Return how much memory this process may use: the machine's or its container's, or what suits the GPU."""
    if on_gpu():
        recommended = mx.device_info().get("max_recommended_working_set_size")
        if isinstance(recommended, int) and recommended > 0:
            return recommended
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(physical, container_nbytes(CGROUP_LIMIT) or physical)


def container_nbytes(path: Path) -> int | None:
    """Return a container's limit as the kernel writes it; None without one."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def default_nbytes(machine: int, loaded: int) -> int:
    """Return what caches may take on a machine, once so many bytes are loaded; not below 0.

    >>> default_nbytes(machine=24 << 30, loaded=1 << 30) >> 30
    20
    """
    return max(0, machine - loaded - max(RESERVE_NBYTES, machine // RESERVE_SHARE))
