"""Reciprocals and square roots by themselves, as the other kernels take them: to try them on every mantissa."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from muser_prefill.kernels.exact.triton.launch import cdiv, launch
from muser_prefill.kernels.exact.triton.steps import reciprocal

TILE, WARPS = 1024, 4


@triton.jit
def roots_kernel(x_p, reciprocals_p, roots_p, count, tile: tl.constexpr):
    """Store 1 / x and the square root of each number."""
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    x = tl.load(x_p + at, mask=at < count, other=1.0)
    tl.store(reciprocals_p + at, reciprocal(x), mask=at < count)
    tl.store(roots_p + at, tl.sqrt_rn(x), mask=at < count)


def roots(x: torch.Tensor) -> list[torch.Tensor]:
    """Return 1 / x and the square roots of a vector."""
    found = [torch.empty_like(x) for _ in range(2)]
    launch(roots_kernel, (cdiv(len(x), TILE),), x, *found, len(x), tile=TILE, warps=WARPS)
    return found
