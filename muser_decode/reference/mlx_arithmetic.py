"""The reference lane's steps in MLX operations.

Operations are taken one by one: nothing here is compiled, so nothing is contracted into fused multiply-adds.
Matrix products of integers are exact in float32 whatever BLAS or kernel does them. TF32, in which MLX multiplies
float32 on some GPUs unless told not to, holds 11 bits, and the integers have 12: so it is told.
"""

from __future__ import annotations

import os
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from muser_wire.reference.arithmetic import Array


class MlxArithmetic:
    """MLX on its default device. Lazy: values are computed by `host`, or by `evaluate`."""

    name = "mlx"

    def __init__(self) -> None:
        # MLX reads it once, at the process's first product; a node of this lane makes that one here, in conformance.
        os.environ["MLX_ENABLE_TF32"] = "0"

    def array(self, values: npt.NDArray[Any]) -> Array:
        """Return a copy on the device."""
        return mx.array(np.ascontiguousarray(values))

    def host(self, x: Array) -> npt.NDArray[Any]:
        """Return a C-contiguous copy."""
        return np.array(x)

    def zeros(self, shape: tuple[int, ...]) -> Array:
        """Return +0."""
        return mx.zeros(shape)

    def full(self, shape: tuple[int, ...], value: float) -> Array:
        """Return one value everywhere."""
        return mx.full(shape, value, mx.float32)

    def arange(self, start: int, stop: int) -> Array:
        """Return int32 numbers."""
        return mx.arange(start, stop, dtype=mx.int32)

    def reshape(self, x: Array, shape: tuple[int, ...]) -> Array:
        """Return another shape."""
        return mx.reshape(x, shape)

    def swap(self, x: Array, a: int, b: int) -> Array:
        """Return two axes exchanged."""
        return mx.swapaxes(x, a, b)

    def broadcast(self, x: Array, shape: tuple[int, ...]) -> Array:
        """Return a broadcast view."""
        return mx.broadcast_to(x, shape)

    def concatenate(self, parts: list[Array], axis: int) -> Array:
        """Return arrays joined."""
        return mx.concatenate(parts, axis)

    def absolute(self, x: Array) -> Array:
        """Return |x|."""
        return mx.abs(x)

    def rint(self, x: Array) -> Array:
        """Return whole numbers, halves to even."""
        return mx.round(x)

    def floor(self, x: Array) -> Array:
        """Return whole numbers, downwards."""
        return mx.floor(x)

    def sqrt(self, x: Array) -> Array:
        """Return the square root; that it is correctly rounded is for conformance to find."""
        return mx.sqrt(x)

    def reciprocal(self, x: Array) -> Array:
        """Return 1 / x by a division."""
        return 1.0 / x

    def maximum(self, a: Array, b: Array | float) -> Array:
        """Return the larger."""
        return mx.maximum(a, b)

    def minimum(self, a: Array, b: Array | float) -> Array:
        """Return the smaller."""
        return mx.minimum(a, b)

    def select(self, condition: Array, a: Array, b: Array) -> Array:
        """Return a where the condition holds, else b."""
        return mx.where(condition, a, b)

    def largest(self, x: Array) -> Array:
        """Return the largest along the last axis."""
        return mx.max(x, axis=-1, keepdims=True)

    def bits(self, x: Array) -> Array:
        """Return float32 bits."""
        return mx.view(x, mx.int32)

    def from_bits(self, x: Array) -> Array:
        """Return float32 of bits."""
        return mx.view(x, mx.float32)

    def to_int32(self, x: Array) -> Array:
        """Return int32."""
        return x.astype(mx.int32)

    def to_float32(self, x: Array) -> Array:
        """Return float32."""
        return x.astype(mx.float32)

    def to_float16(self, x: Array) -> Array:
        """Return float16."""
        return x.astype(mx.float16)

    def integer_sum(self, x: Array) -> Array:
        """Return exact sums: no order matters below 2 ** 24."""
        return mx.sum(x, axis=-1, keepdims=True)

    def integer_dot(self, a: Array, b: Array) -> Array:
        """Return exact matrix products."""
        return mx.matmul(a, b)

    def evaluate(self, *arrays: Array) -> None:
        """Compute what was put off."""
        mx.eval(*arrays)
