"""The kernel of linear layers [N4]: y[t, n] = sum over groups g, ascending, of s[g, n] * D (+ m[g, n] * S), from +0.

Of a group, D is the exact integer product of two int8 limbs with int8 weights, in int32, times the group's power of
two; S is the integers' sum times that. |D| is at most 2 ** 24 before scaling, so float32 holds it exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from muser_prefill.kernels.exact.triton.steps import GROUP, LIMB


@triton.jit
def _product(high, low, weights):
    """Return the exact integer products `[tokens, outputs]` of a group as float32."""
    product = tl.dot(high, weights, out_dtype=tl.int32) * LIMB
    return tl.dot(low, weights, product, out_dtype=tl.int32).to(tl.float32)


@triton.jit
def _with_group(acc, g, high, low, weights, token, output, x, matrix, tokens, outputs, part: tl.constexpr):
    """Return `acc` with one group of activations added: one group of weights, or two of 16 in order."""
    scales_p, sums_p = x
    weight_scales_p, offsets_p = matrix
    seen = output < outputs
    scale = tl.load(scales_p + g * tokens + token, mask=token < tokens, other=0.0)
    for i in tl.static_range(GROUP // part):
        of_part = weights
        if part < GROUP:
            # The tensor cores' smallest product has 32 columns: those of the other part count as zero.
            of_part = tl.where((tl.arange(0, GROUP) // part == i)[:, None], weights, 0)
        row = g * (GROUP // part) + i
        s = tl.load(weight_scales_p + row * outputs + output, mask=seen, other=0.0)
        t = s[None, :] * (_product(high, low, of_part) * scale[:, None])
        if offsets_p is not None:
            m = tl.load(offsets_p + row * outputs + output, mask=seen, other=0.0)
            sums = tl.load(sums_p + g * tokens + token, mask=token < tokens, other=0.0)
            t = t + m[None, :] * sums[:, None]
        acc = acc + t
    return acc


@triton.jit(do_not_specialize=["tokens"])
def linear_kernel(
    limbs,
    x,
    weights_p,
    matrix,
    residual_p,
    to_p,
    tokens,
    outputs,
    columns,
    stride,
    part: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
):
    """Store the products `[tokens, outputs]`, added to the residual where there is one; rows lie `stride` apart.

    `limbs` and `x` are activations (`row_kernels`); `weights_p` int8 `[outputs, columns]`; `matrix` scales and
    offsets (or None) `[columns / part, outputs]`, `part` 32 or 16. A program has `rows` tokens and `width` outputs;
    neighbours have the same outputs, so that weights are read from memory once.
    """
    high_p, low_p = limbs
    token = tl.program_id(0) * rows + tl.arange(0, rows)
    output = tl.program_id(1) * width + tl.arange(0, width)
    k = tl.arange(0, GROUP)
    x_at = token.to(tl.int64)[:, None] * columns + k[None, :]
    weights_at = output.to(tl.int64)[None, :] * columns + k[:, None]
    acc = tl.zeros([rows, width], tl.float32)
    for g in range(columns // GROUP):
        high = tl.load(high_p + x_at + g * GROUP, mask=(token < tokens)[:, None], other=0)
        low = tl.load(low_p + x_at + g * GROUP, mask=(token < tokens)[:, None], other=0)
        weights = tl.load(weights_p + weights_at + g * GROUP, mask=(output < outputs)[None, :], other=0)
        acc = _with_group(acc, g, high, low, weights, token, output, x, matrix, tokens, outputs, part)
    seen = (token < tokens)[:, None] & (output < outputs)[None, :]
    at = token.to(tl.int64)[:, None] * stride + output[None, :]
    if residual_p is not None:
        acc = tl.load(residual_p + at, mask=seen, other=0.0) + acc
    tl.store(to_p + at, acc, mask=seen)
