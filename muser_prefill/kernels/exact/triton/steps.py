"""The lane's steps inside a kernel [N2, N3, N6]: what every kernel of this folder is made of.

Only `+ - *`, `div_rn`, `sqrt_rn`, comparisons, shifts and casts: Triton's own `/`, `exp2`, `sqrt` and `sum` of floats
are approximate or of no written order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from muser_wire.reference import constants

HALF_UP = tl.constexpr(1.5 * 2.0**23)
"""Added and taken away again, it rounds what is below 2 ** 22 to a whole number, halves to even."""
GROUP = tl.constexpr(constants.WEIGHT_GROUP)
LANES = tl.constexpr(constants.LANES)
LIMB = tl.constexpr(1 << constants.LIMB_BITS)
LIMB_SHARE = tl.constexpr(2.0**-constants.LIMB_BITS)
TOP_BIT = tl.constexpr(constants.INTEGER_BITS - 1)
SMALLEST = tl.constexpr(constants.SMALLEST_EXPONENT)
EXP2_LIMIT = tl.constexpr(constants.EXP2_LIMIT)
C4, C3, C2, C1, C0 = (tl.constexpr(value) for value in constants.EXP2_COEFFICIENTS)
MINUS_LOG2_E = tl.constexpr(-constants.LOG2_E)
GELU_LINEAR = tl.constexpr(constants.GELU_LINEAR)
GELU_CUBIC = tl.constexpr(constants.GELU_CUBIC)


@triton.jit
def rint(x):
    """Return whole numbers of |x| below 2 ** 22."""
    return (x + HALF_UP) - HALF_UP


@triton.jit
def power_of_two(exponents):
    """Return 2 ** e for int32 e from -126 to 127."""
    return ((exponents + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def largest_exponent(largest, smallest: tl.constexpr):
    """Return e, int32, of a group's largest magnitude: 2 ** -e times that is above 2 ** 11 and at most 2 ** 12."""
    exponents = ((largest.to(tl.int32, bitcast=True) >> 23) & 255) - 127
    return tl.maximum(exponents, smallest) - TOP_BIT


@triton.jit
def limbs(values):
    """Return integers up to 2 ** 12 as int8 (high, low), value = high * 2 ** 6 + low."""
    high = rint(values * LIMB_SHARE)
    low = values - high * LIMB
    return high.to(tl.int8), low.to(tl.int8)


@triton.jit
def reciprocal(x):
    """Return 1 / x, correctly rounded."""
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def exp2(x):
    """Return 2 ** x of x clamped to +-120."""
    y = tl.minimum(tl.maximum(x, -EXP2_LIMIT), EXP2_LIMIT)
    n = rint(y)
    r = y - n
    p = r * C4
    p = (p + C3) * r
    p = (p + C2) * r
    p = (p + C1) * r
    p = p + C0
    return (p.to(tl.int32, bitcast=True) + (n.to(tl.int32) << 23)).to(tl.float32, bitcast=True)


@triton.jit
def sigmoid(x):
    """Return 1 / (2 ** (x * -log2 e) + 1)."""
    return reciprocal(exp2(x * MINUS_LOG2_E) + 1.0)


@triton.jit
def activated(gate, up, gelu: tl.constexpr):
    """Return (gate * sigmoid(v)) * up: v is the gate, or for gelu gate * (a + b * (gate * gate))."""
    v = gate
    if gelu:
        cubic = gate * gate
        cubic = cubic * GELU_CUBIC
        cubic = cubic + GELU_LINEAR
        v = gate * cubic
    return (gate * sigmoid(v)) * up


@triton.jit
def _half_sum(x, rows: tl.constexpr, width: tl.constexpr):
    """Return the second half of each row added to the first, `[rows, width]` of `[rows, 2 * width]`."""
    first, second = tl.split(tl.permute(tl.reshape(x, [rows, 2, width]), [0, 2, 1]))
    return first + second


@triton.jit
def lanes_sum(x, rows: tl.constexpr):
    """Return the sums `[rows]` of `[rows, 64]`, the second half of what is left added to the first [N5]."""
    x = _half_sum(x, rows, 32)
    x = _half_sum(x, rows, 16)
    x = _half_sum(x, rows, 8)
    x = _half_sum(x, rows, 4)
    x = _half_sum(x, rows, 2)
    x = _half_sum(x, rows, 1)
    return tl.reshape(x, [rows])


@triton.jit
def inverse_root(square_lanes, one_over, eps, rows: tl.constexpr):
    """Return 1 / sqrt(mean of squares + eps) of rows, from the squares' 64 sums."""
    return reciprocal(tl.sqrt_rn(lanes_sum(square_lanes, rows) * one_over + eps))
