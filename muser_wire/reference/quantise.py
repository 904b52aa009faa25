"""Vectors as integers times powers of two [N3]. Scaling by a power of two is exact, so no division is needed."""

from __future__ import annotations

from dataclasses import dataclass

from muser_wire.reference.arithmetic import Arithmetic, Array
from muser_wire.reference.constants import INTEGER_BITS, LIMB_BITS, SMALLEST_EXPONENT


@dataclass(frozen=True, eq=False)
class Quantised:
    """A vector in groups: component j of group g is `values[..., g, j] * 2 ** exponents[..., g, 0]`.

    `values` are integers in float32 `[..., groups, group]`, `exponents` int32 `[..., groups, 1]`.
    """

    values: Array
    exponents: Array


def exponent_of(ar: Arithmetic, x: Array) -> Array:
    """Return floor(log2 x) of non-negative float32, as int32; -127 for 0."""
    return ((ar.bits(x) >> 23) & 255) - 127


def power_of_two(ar: Arithmetic, exponents: Array) -> Array:
    """Return 2 ** e in float32 for int32 e from -126 to 127."""
    return ar.from_bits((exponents + 127) << 23)


def quantise(ar: Arithmetic, x: Array, group: int) -> Quantised:
    """Return `x [..., n]` in groups of `group`, with magnitudes of at most 2 ** 12.

    A group's exponent is that of its largest magnitude, and at least `SMALLEST_EXPONENT`.
    """
    shape = tuple(x.shape)
    grouped = ar.reshape(x, (*shape[:-1], shape[-1] // group, group))
    exponents = largest_exponent(ar, ar.absolute(grouped), SMALLEST_EXPONENT)
    return Quantised(ar.rint(grouped * power_of_two(ar, 0 - exponents)), exponents)


def largest_exponent(ar: Arithmetic, x: Array, smallest: int) -> Array:
    """Return e so that 2 ** -e times non-negative `x` is at most 2 ** 12, and above 2 ** 11, along the last axis.

    e is that of the largest, counted from 2 ** 11, and no smaller than that of 2 ** `smallest`.
    """
    exponents = exponent_of(ar, ar.largest(x))
    return ar.select(exponents < smallest, exponents * 0 + smallest, exponents) - (INTEGER_BITS - 1)


def limbs(ar: Arithmetic, values: Array) -> tuple[Array, Array]:
    """Return integers up to 2 ** 12 as (high, low), value = high * 2 ** 6 + low: at most 2 ** 6 and 2 ** 5."""
    high = ar.rint(values * 2.0**-LIMB_BITS)
    return high, values - high * 2.0**LIMB_BITS
