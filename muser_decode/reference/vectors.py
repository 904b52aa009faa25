"""The lane's steps on vectors, in as few MLX operations as give its bytes.

A decoded token is thousands of operations of some microseconds, most of them on a few hundred numbers: their count is
what one costs. So powers of two are made of exponent bits by integer operations, and a sum in order is one `mx.sum`
over an axis that is not the last, where MLX adds row after row; conformance checks that at start.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from muser_decode.reference.sums import ordered_sum
from muser_wire.model.spec import Activation, ModelSpec, as_f32
from muser_wire.reference.constants import (
    EXP2_COEFFICIENTS,
    EXP2_LIMIT,
    GELU_CUBIC,
    GELU_LINEAR,
    LANES,
    LOG2_E,
)

EXPONENT_MASK = 0x7F800000
MANTISSA_BITS = 23
HALVINGS = (2,) * (LANES.bit_length() - 1)
BIAS = 127


LARGEST_CONSTANT = 4096
"""A constant is kept in the shapes of arrays of so many numbers or fewer."""


class Constant:
    """One number, as an array of the shape that an operation has: repeating a scalar is an operation of its own."""

    def __init__(self, value: float, dtype: mx.Dtype = mx.float32) -> None:
        self.scalar = mx.array(value, dtype=dtype)
        self._shaped: dict[tuple[int, ...], mx.array] = {}

    def like(self, x: mx.array) -> mx.array:
        """Return the number in the shape of `x`, or once where `x` is large."""
        shape = x.shape
        found = self._shaped.get(shape)
        if found is None:
            if x.size > LARGEST_CONSTANT:
                return self.scalar
            found = self._shaped[shape] = mx.full(shape, self.scalar)
            mx.eval(found)
        return found


def whole(value: int) -> Constant:
    """Return an int32 constant."""
    return Constant(value, mx.int32)


class Scales(NamedTuple):
    """For each group the power of two that makes its numbers integers, and the one that makes numbers of them again."""

    up: mx.array
    down: mx.array


class Quantiser:
    """Groups of numbers as integers of at most 2 ** bits times a power of two [N3]."""

    def __init__(self, bits: int, smallest_exponent: int) -> None:
        self._mask = whole(EXPONENT_MASK)
        self._least = whole((smallest_exponent + BIAS) << MANTISSA_BITS)
        # With a biased exponent e: 2 ** (bits - 1 - (e - BIAS)) has 2 * BIAS + bits - 1 - e.
        self._up = whole((2 * BIAS + bits - 1) << MANTISSA_BITS)
        self._down = whole((bits - 1) << MANTISSA_BITS)

    def scales(self, x: mx.array) -> Scales:
        """Return the scales `[..., 1]` of groups that lie along the last axis."""
        bits = mx.view(x, mx.int32)
        return self._of(mx.max(bits & self._mask.like(bits), axis=-1, keepdims=True))

    def scales_of_largest(self, largest: mx.array) -> Scales:
        """Return the scales of groups whose largest magnitudes are given."""
        bits = mx.view(largest, mx.int32)
        return self._of(bits & self._mask.like(bits))

    def _of(self, exponents: mx.array) -> Scales:
        exponents = mx.maximum(exponents, self._least.like(exponents))
        up, down = self._up.like(exponents) - exponents, exponents - self._down.like(exponents)
        return Scales(mx.view(up, mx.float32), mx.view(down, mx.float32))


class Exp2:
    """2 ** y [N6], times a constant power of two at no cost. `y` is within the lane's limits."""

    def __init__(self, exponent: int = 0) -> None:
        self._coefficients = [Constant(value * 2.0**exponent) for value in EXP2_COEFFICIENTS]
        self._shift = whole(MANTISSA_BITS)

    def __call__(self, y: mx.array) -> mx.array:
        """Return the power."""
        n = mx.round(y)
        r = y - n
        p = r * self._coefficients[0].like(y)
        for coefficient in self._coefficients[1:-1]:
            p = p + coefficient.like(y)
            p = p * r
        p = p + self._coefficients[-1].like(y)
        exponents = mx.left_shift(n.astype(mx.int32), self._shift.like(y))
        return mx.view(mx.view(p, mx.int32) + exponents, mx.float32)


class Pointwise:
    """The functions of single numbers [N6] that a model has."""

    def __init__(self, spec: ModelSpec) -> None:
        self._exp2 = Exp2()
        self._lowest, self._highest = Constant(-EXP2_LIMIT), Constant(EXP2_LIMIT)
        self._one, self._two, self._minus_log2_e = Constant(1.0), Constant(2.0), Constant(-LOG2_E)
        self._cubic, self._linear = Constant(GELU_CUBIC), Constant(GELU_LINEAR)
        self._gelu = spec.activation is Activation.GELU_TANH
        self._scale = None if spec.logit_scale == 1.0 else Constant(spec.logit_scale)
        cap = spec.logit_softcap
        self._cap = None if cap is None else (Constant(as_f32(1.0 / cap)), Constant(cap))

    def sigmoid(self, x: mx.array) -> mx.array:
        """Return 1 / (1 + exp(-x))."""
        y = mx.maximum(x * self._minus_log2_e.like(x), self._lowest.like(x))
        z = self._exp2(mx.minimum(y, self._highest.like(x)))
        one = self._one.like(x)
        return one / (z + one)

    def activated(self, gate: mx.array, up: mx.array) -> mx.array:
        """Return (gate * sigmoid(v)) * up: v is the gate for silu; for gelu in its tanh form a cubic of it."""
        v = gate
        if self._gelu:
            v = gate * ((gate * gate) * self._cubic.like(gate) + self._linear.like(gate))
        return (gate * self.sigmoid(v)) * up

    def logits(self, x: mx.array) -> mx.array:
        """Return logits scaled and capped as the model does."""
        if self._scale is not None:
            x = x * self._scale.like(x)
        if self._cap is None:
            return x
        inverse, cap = self._cap
        two = self._two.like(x)
        tanh = self.sigmoid((x * inverse.like(x)) * two) * two - self._one.like(x)
        return tanh * cap.like(x)


class Norm:
    """RMSNorm over the last axis [N5], with or without weights."""

    def __init__(self, weight: mx.array | None, size: int, eps: float) -> None:
        self._weight = weight
        self._inverse_size, self._eps, self._one = Constant(as_f32(1.0 / size)), Constant(eps), Constant(1.0)
        self._filling = -size % LANES

    def __call__(self, x: mx.array) -> mx.array:
        """Return (x * r) * weight, r = 1 / sqrt(sum of squares * f32(1 / n) + eps)."""
        mean = self._sum(x * x)
        mean = mean * self._inverse_size.like(mean)
        r = self._one.like(mean) / mx.sqrt(mean + self._eps.like(mean))
        scaled = x * r
        return scaled if self._weight is None else scaled * self._weight

    def _sum(self, squares: mx.array) -> mx.array:
        """Return sums `[..., 1]`: lanes first, rows of lanes ascending, then the lanes by halving."""
        shape = squares.shape[:-1]
        if self._filling:
            squares = mx.pad(squares, [(0, 0)] * len(shape) + [(0, self._filling)])
        # Each halving of the lanes is an axis of 2, and two terms have one order.
        lanes = ordered_sum(squares.reshape(*shape, -1, *HALVINGS), len(shape))
        for axis in range(-len(HALVINGS), 0):
            lanes = mx.sum(lanes, axis=axis, keepdims=True)
        return lanes.reshape(*shape, 1)
