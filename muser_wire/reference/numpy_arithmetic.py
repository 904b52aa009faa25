"""The reference lane's steps in numpy: the plain definition that every other library is compared with.

Dot products are taken in int64, or, with `wide` float64, by the faster float64 product, which is exact as well: no sum
of absolute products passes 2 ** 24.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from muser_wire.reference.arithmetic import Array


class NumpyArithmetic:
    """Numpy on the host."""

    name = "numpy"

    def __init__(self, wide: type[np.int64 | np.float64] = np.int64) -> None:
        self._wide = wide

    def array(self, values: npt.NDArray[Any]) -> Array:
        """Return the array itself."""
        return np.asarray(values)

    def host(self, x: Array) -> npt.NDArray[Any]:
        """Return a C-contiguous array."""
        return np.ascontiguousarray(x)

    def zeros(self, shape: tuple[int, ...]) -> Array:
        """Return +0."""
        return np.zeros(shape, np.float32)

    def full(self, shape: tuple[int, ...], value: float) -> Array:
        """Return one value everywhere."""
        return np.full(shape, value, np.float32)

    def arange(self, start: int, stop: int) -> Array:
        """Return int32 numbers."""
        return np.arange(start, stop, dtype=np.int32)

    def reshape(self, x: Array, shape: tuple[int, ...]) -> Array:
        """Return another shape."""
        return np.reshape(x, shape)

    def swap(self, x: Array, a: int, b: int) -> Array:
        """Return two axes exchanged."""
        return np.swapaxes(x, a, b)

    def broadcast(self, x: Array, shape: tuple[int, ...]) -> Array:
        """Return a broadcast view."""
        return np.broadcast_to(x, shape)

    def concatenate(self, parts: list[Array], axis: int) -> Array:
        """Return arrays joined."""
        return np.concatenate(parts, axis)

    def absolute(self, x: Array) -> Array:
        """Return |x|."""
        return np.abs(x)

    def rint(self, x: Array) -> Array:
        """Return whole numbers, halves to even."""
        return np.rint(x)

    def floor(self, x: Array) -> Array:
        """Return whole numbers, downwards."""
        return np.floor(x)

    def sqrt(self, x: Array) -> Array:
        """Return the square root."""
        return np.sqrt(x)

    def reciprocal(self, x: Array) -> Array:
        """Return 1 / x."""
        return np.float32(1) / x

    def maximum(self, a: Array, b: Array | float) -> Array:
        """Return the larger."""
        return np.maximum(a, b)

    def minimum(self, a: Array, b: Array | float) -> Array:
        """Return the smaller."""
        return np.minimum(a, b)

    def select(self, condition: Array, a: Array, b: Array) -> Array:
        """Return a where the condition holds, else b."""
        return np.where(condition, a, b)

    def largest(self, x: Array) -> Array:
        """Return the largest along the last axis."""
        return np.max(x, axis=-1, keepdims=True)

    def bits(self, x: Array) -> Array:
        """Return float32 bits."""
        return np.ascontiguousarray(x).view(np.int32)

    def from_bits(self, x: Array) -> Array:
        """Return float32 of bits."""
        return np.ascontiguousarray(x).view(np.float32)

    def to_int32(self, x: Array) -> Array:
        """Return int32."""
        return x.astype(np.int32)

    def to_float32(self, x: Array) -> Array:
        """Return float32."""
        return x.astype(np.float32)

    def to_float16(self, x: Array) -> Array:
        """Return float16."""
        return x.astype(np.float16)

    def integer_sum(self, x: Array) -> Array:
        """Return exact sums."""
        return np.sum(x.astype(np.int64), axis=-1, keepdims=True).astype(np.float32)

    def integer_dot(self, a: Array, b: Array) -> Array:
        """Return exact matrix products."""
        return np.matmul(a.astype(self._wide), b.astype(self._wide)).astype(np.float32)

    def evaluate(self, *arrays: Array) -> None:
        """Do nothing: numpy computes at once."""
