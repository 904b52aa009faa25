"""Kernels over rows of activations [N3, N5, N6]: norm, activation or gate, and the quantisation that follows.

Each takes `[tokens, columns]` float32, contiguous or with a stride, columns a multiple of 32, and gives activations as
`linear_kernel` reads them: int8 limbs `[tokens, columns]`, and of each group of 32 columns its power of two and its
integer sum times that, float32 `[columns / 32, tokens]`. A tile has `rows` rows and `width` columns, a multiple of 32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from muser_prefill.kernels.exact.triton.steps import (
    GROUP,
    LANES,
    SMALLEST,
    activated,
    inverse_root,
    largest_exponent,
    limbs,
    power_of_two,
    rint,
    sigmoid,
)


@triton.jit
def _square_lanes(x_p, row, tokens, columns, stride, rows: tl.constexpr):
    """Return the 64 sums of each row's squares, the row's parts of 64 added ascending."""
    lane = tl.arange(0, LANES)
    total = tl.zeros([rows, LANES], tl.float32)
    for start in range(0, columns, LANES):
        column = start + lane
        seen = (row < tokens)[:, None] & (column < columns)[None, :]
        x = tl.load(x_p + row.to(tl.int64)[:, None] * stride + column[None, :], mask=seen, other=0.0)
        total = total + x * x
    return total


@triton.jit
def _store(x, to, row, start, tokens, columns, rows: tl.constexpr, width: tl.constexpr):
    """Quantise a tile `[rows, width]` whose first column is `start` into `to`: high, low, powers of two, sums."""
    high_p, low_p, scales_p, sums_p = to
    x = tl.reshape(x, [rows, width // GROUP, GROUP])
    exponents = largest_exponent(tl.max(tl.abs(x), 2), SMALLEST)
    values = rint(x * power_of_two(0 - exponents)[:, :, None])
    high, low = limbs(values)
    group = start // GROUP + tl.arange(0, width // GROUP)
    seen = (row < tokens)[:, None] & (group < columns // GROUP)[None, :]
    at = row.to(tl.int64)[:, None, None] * columns + (group * GROUP)[None, :, None] + tl.arange(0, GROUP)[None, None, :]
    tl.store(high_p + at, high, mask=seen[:, :, None])
    tl.store(low_p + at, low, mask=seen[:, :, None])
    scales = power_of_two(exponents)
    at = group.to(tl.int64)[None, :] * tokens + row[:, None]
    tl.store(scales_p + at, scales, mask=seen)
    # Whole numbers below 2 ** 24: exact in any order.
    tl.store(sums_p + at, tl.sum(values, 2) * scales, mask=seen)


@triton.jit(do_not_specialize=["tokens"])
def quantise_kernel(x_p, weight_p, to, tokens, columns, one_over, eps, rows: tl.constexpr, width: tl.constexpr):
    """Quantise rows: after RMSNorm with `weight_p`, or as they are where that is None. A program has `rows` rows."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    normed: tl.constexpr = weight_p is not None
    if normed:
        root = inverse_root(_square_lanes(x_p, row, tokens, columns, columns, rows), one_over, eps, rows)
    for start in range(0, columns, width):
        column = start + tl.arange(0, width)
        seen = (row < tokens)[:, None] & (column < columns)[None, :]
        x = tl.load(x_p + row.to(tl.int64)[:, None] * columns + column[None, :], mask=seen, other=0.0)
        if normed:
            weight = tl.load(weight_p + column, mask=column < columns, other=0.0)
            x = (x * root[:, None]) * weight[None, :]
        _store(x, to, row, start, tokens, columns, rows, width)


@triton.jit(do_not_specialize=["tokens"])
def activate_kernel(x_p, to, tokens, columns, gelu: tl.constexpr, rows: tl.constexpr, width: tl.constexpr):
    """Quantise f(gate) * up of `[tokens, 2 * columns]`, gate and up side by side. A program has one tile."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    start = tl.program_id(1) * width
    column = start + tl.arange(0, width)
    seen = (row < tokens)[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * (2 * columns) + column[None, :]
    gate = tl.load(x_p + at, mask=seen, other=0.0)
    up = tl.load(x_p + at + columns, mask=seen, other=0.0)
    _store(activated(gate, up, gelu), to, row, start, tokens, columns, rows, width)


@triton.jit(do_not_specialize=["tokens"])
def gate_kernel(x_p, gate_p, to, tokens, columns, gate_stride, rows: tl.constexpr, width: tl.constexpr):
    """Quantise x * sigmoid(gate). A program has one tile."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    start = tl.program_id(1) * width
    column = start + tl.arange(0, width)
    seen = (row < tokens)[:, None] & (column < columns)[None, :]
    x = tl.load(x_p + row.to(tl.int64)[:, None] * columns + column[None, :], mask=seen, other=0.0)
    gate = tl.load(gate_p + row.to(tl.int64)[:, None] * gate_stride + column[None, :], mask=seen, other=0.0)
    _store(x * sigmoid(gate), to, row, start, tokens, columns, rows, width)


@triton.jit(do_not_specialize=["tokens"])
def add_normed_kernel(
    residual_p, x_p, weight_p, to_p, tokens, columns, one_over, eps, rows: tl.constexpr, width: tl.constexpr
):
    """Store residual + RMSNorm(x). A program has `rows` rows."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    root = inverse_root(_square_lanes(x_p, row, tokens, columns, columns, rows), one_over, eps, rows)
    for start in range(0, columns, width):
        column = start + tl.arange(0, width)
        seen = (row < tokens)[:, None] & (column < columns)[None, :]
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        x = tl.load(x_p + at, mask=seen, other=0.0)
        weight = tl.load(weight_p + column, mask=column < columns, other=0.0)
        residual = tl.load(residual_p + at, mask=seen, other=0.0)
        tl.store(to_p + at, residual + (x * root[:, None]) * weight[None, :], mask=seen)
