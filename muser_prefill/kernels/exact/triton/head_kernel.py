"""The kernel of queries and keys before attention [N5, N7]: norm over the head, positions, rounding to a plane."""

from __future__ import annotations

import triton
import triton.language as tl

from muser_prefill.kernels.exact.triton.steps import LANES, inverse_root
from muser_wire.reference import constants

PLANE_SMALLEST = tl.constexpr(constants.PLANE_SMALLEST)
PLANE_LARGEST = tl.constexpr(constants.PLANE_LARGEST)


@triton.jit
def _root(x_p, seen, head_dim, one_over, eps, rows: tl.constexpr):
    """Return the inverse root mean square of heads at `x_p` `[rows, 1]`."""
    lane = tl.arange(0, LANES)
    total = tl.zeros([rows, LANES], tl.float32)
    for start in range(0, head_dim, LANES):
        component = start + lane
        x = tl.load(x_p + component[None, :], mask=seen & (component < head_dim)[None, :], other=0.0)
        total = total + x * x
    return inverse_root(total, one_over, eps, rows)


@triton.jit
def _components(x_p, weight_p, root, at, seen, normed: tl.constexpr):
    """Return the components `at` of heads, after the norm where there is one."""
    x = tl.load(x_p + at[None, :], mask=seen, other=0.0)
    if normed:
        x = x * root[:, None]
        if weight_p is not None:
            x = x * tl.load(weight_p + at)[None, :]
    return x


@triton.jit
def _plane(x):
    """Return float16: magnitudes under 2 ** -14 are 0, the largest 65504."""
    x = tl.where(tl.abs(x) < PLANE_SMALLEST, 0.0, x)
    return tl.minimum(tl.maximum(x, -PLANE_LARGEST), PLANE_LARGEST).to(tl.float16)


@triton.jit(do_not_specialize=["count"])
def heads_kernel(
    x_p,
    weight_p,
    angles,
    to_p,
    count,
    stride,
    one_over,
    eps,
    normed: tl.constexpr,
    plane: tl.constexpr,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    half: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
):
    """Store heads `[tokens, heads, head_dim]` as float32 or as a plane; tokens of `x_p` lie `stride` apart.

    `angles` are cosines and sines `[tokens, half]`; `half` is 0 where there are no positions. `count` is tokens times
    heads; a program has `rows` of them. `width` is head_dim, or the next power of two.
    """
    cos_p, sin_p = angles
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    token, here = row // heads, (row < count)[:, None]
    x_p += (token * stride + row % heads * head_dim)[:, None]
    root = tl.zeros([rows], tl.float32)
    if normed:
        root = _root(x_p, here, head_dim, one_over, eps, rows)
    at = tl.arange(0, width)
    seen = here & (at < head_dim)[None, :]
    at = tl.minimum(at, head_dim - 1)
    x = _components(x_p, weight_p, root, at, seen, normed)
    if half > 0:
        turned, first = at < 2 * half, at < half
        partner = _components(
            x_p, weight_p, root, tl.where(turned, tl.where(first, at + half, at - half), at), seen, normed
        )
        angle = token[:, None] * half + tl.where(turned, at % half, 0)[None, :]
        cos = tl.load(cos_p + angle, mask=seen, other=0.0)
        sin = tl.load(sin_p + angle, mask=seen, other=0.0)
        product, other = x * cos, partner * sin
        x = tl.where(turned[None, :], tl.where(first[None, :], product - other, other + product), x)
    to = to_p + row[:, None] * head_dim + at[None, :]
    tl.store(to, _plane(x) if plane else x, mask=seen)
