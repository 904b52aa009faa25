"""Kernel admission: no hand-written kernel is used here because it once passed elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from muser_wire.errors import KernelUnavailable

logger = logging.getLogger(__name__)


def admit(name: str, kernel: Callable[[], torch.Tensor], reference: Callable[[], torch.Tensor], max_abs: float) -> bool:
    """Return whether `kernel()` is within `max_abs` of `reference()` everywhere.

    A miss, or a kernel that this build lacks, is logged.
    """
    try:
        error = _max_abs_error(kernel(), reference())
    except (AttributeError, RuntimeError) as cause:
        logger.warning("kernel_refused name=%s cause=%s", name, str(cause).partition("\n")[0])
        return False
    if not error <= max_abs:
        logger.warning("kernel_refused name=%s error=%.3g budget=%.3g", name, error, max_abs)
        return False
    logger.info("kernel_admitted name=%s error=%.3g budget=%.3g", name, error, max_abs)
    return True


def _max_abs_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference; NaN, which no budget allows, where either side has one."""
    return float((got.float() - expected.float()).abs().max())


def fixed_vector(shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return normal values of unit scale, the same on every device and in every process, rounded to `dtype`."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype=dtype, device=device)


def admit_exact(
    name: str, kernel: Callable[[], Sequence[torch.Tensor]], reference: Callable[[], Sequence[torch.Tensor]]
) -> bool:
    """Return whether `kernel()` gives the bytes of `reference()`, except that a zero may have either sign.

    A miss, or a kernel that cannot run here, is logged.
    """
    try:
        differing = sum(_differing(*pair) for pair in zip(kernel(), reference(), strict=True))
    except (AttributeError, RuntimeError, ValueError, KernelUnavailable) as cause:
        logger.warning("kernel_refused name=%s cause=%s", name, str(cause).partition("\n")[0])
        return False
    if differing:
        logger.warning("kernel_refused name=%s differing_values=%d", name, differing)
        return False
    logger.info("kernel_admitted name=%s exact=%s", name, "true")
    return True


def _differing(got: torch.Tensor, expected: torch.Tensor) -> int:
    """How many values are not equal; NaN equals nothing."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        raise ValueError(f"{list(got.shape)} {got.dtype} where {list(expected.shape)} {expected.dtype} belongs")
    return int((got != expected).sum())
