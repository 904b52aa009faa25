"""Starting a Triton kernel: the one place where Triton's errors become the producer's."""

from __future__ import annotations

import subprocess
from typing import Any

from triton.errors import TritonError

from muser_wire.errors import KernelUnavailable

ROUNDED_STEPS = {"enable_fp_fusion": False}
"""Every float32 step rounds by itself. Triton's default contracts x * y + z."""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int, stages: int = 1, **sizes: Any) -> None:
    """Start `kernel` on `grid`; `sizes` are known when it is compiled. An empty grid starts nothing.

    Raises:
        KernelUnavailable: it cannot be compiled for this device, or what starts it cannot be compiled for this machine:
            that takes a C compiler and Python's headers.
    """
    if 0 in grid:
        return
    try:
        kernel[grid](*arguments, num_warps=warps, num_stages=stages, **ROUNDED_STEPS, **sizes)
    except (TritonError, subprocess.CalledProcessError, OSError) as error:
        raise KernelUnavailable(f"Triton cannot compile {kernel.__name__}: {error}") from error


def cdiv(count: int, size: int) -> int:
    """Return how many tiles of `size` hold `count`."""
    return -(-count // size)
