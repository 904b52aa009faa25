"""The steps that the reference lane allows, over one array library [N2].

The lane's algorithm is one text over an `Arithmetic`. Arrays are the library's own; `+ - *` of float32 arrays with
arrays or Python floats that float32 holds exactly, `+ - >> << &` of int32 arrays, comparisons, slices and `shape` are
used as they are: the library must round each float operation by itself, to nearest even, and fuse none. Numbers are
float32 unless said otherwise; "integers" in float32 arrays are whole numbers below 2 ** 24.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy.typing as npt

Array = Any
"""An array of the library: the text below is the same for all, and no type covers their operators."""


class Arithmetic(Protocol):
    """One array library, as far as the lane needs it. `name` is shown to people."""

    name: str

    def array(self, values: npt.NDArray[Any]) -> Array:
        """Return the library's array of a host array: float32, float16, int32 or bool."""

    def host(self, x: Array) -> npt.NDArray[Any]:
        """Return a C-contiguous host array."""

    def zeros(self, shape: tuple[int, ...]) -> Array:
        """Return +0 in float32."""

    def full(self, shape: tuple[int, ...], value: float) -> Array:
        """Return one float32 value everywhere."""

    def arange(self, start: int, stop: int) -> Array:
        """Return the int32 numbers from `start` up to `stop`, which is not among them."""

    def reshape(self, x: Array, shape: tuple[int, ...]) -> Array:
        """Return `x` in another shape, row-major order kept."""

    def swap(self, x: Array, a: int, b: int) -> Array:
        """Return `x` with two axes exchanged."""

    def broadcast(self, x: Array, shape: tuple[int, ...]) -> Array:
        """Return `x` repeated along axes of size 1."""

    def concatenate(self, parts: list[Array], axis: int) -> Array:
        """Return arrays of one type joined along an axis."""

    def absolute(self, x: Array) -> Array:
        """Return |x|."""

    def rint(self, x: Array) -> Array:
        """Return the nearest whole number, halves to even."""

    def floor(self, x: Array) -> Array:
        """Return the largest whole number that is not above x."""

    def sqrt(self, x: Array) -> Array:
        """Return the square root, correctly rounded."""

    def reciprocal(self, x: Array) -> Array:
        """Return 1 / x, correctly rounded."""

    def maximum(self, a: Array, b: Array | float) -> Array:
        """Return the larger of two float32."""

    def minimum(self, a: Array, b: Array | float) -> Array:
        """Return the smaller of two float32."""

    def select(self, condition: Array, a: Array, b: Array) -> Array:
        """Return a where the condition holds, else b; both of one type."""

    def largest(self, x: Array) -> Array:
        """Return the largest along the last axis, which stays with size 1."""

    def bits(self, x: Array) -> Array:
        """Return the bits of float32 as int32."""

    def from_bits(self, x: Array) -> Array:
        """Return the float32 with these int32 bits."""

    def to_int32(self, x: Array) -> Array:
        """Return whole float32 numbers as int32."""

    def to_float32(self, x: Array) -> Array:
        """Return float16 or int32 as float32; int32 rounds to nearest even."""

    def to_float16(self, x: Array) -> Array:
        """Return float32 rounded to float16, to nearest even; no value is subnormal there or out of range."""

    def integer_sum(self, x: Array) -> Array:
        """Return the exact sum of integers along the last axis, which stays with size 1."""

    def integer_dot(self, a: Array, b: Array) -> Array:
        """Return the exact matrix products of integers `[..., M, K]` and `[..., K, N]`.

        The sum of absolute products of each is at most 2 ** 24.
        """

    def evaluate(self, *arrays: Array) -> None:
        """Compute what a lazy library has put off; nothing in others."""
