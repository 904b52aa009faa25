"""Keys and values as they travel [N7], and the integers that attention derives from those bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from muser_wire.reference.arithmetic import Arithmetic, Array
from muser_wire.reference.constants import HEAD_GROUP, PLANE_LARGEST, PLANE_SMALLEST
from muser_wire.reference.quantise import limbs, quantise


def plane(ar: Arithmetic, x: Array) -> Array:
    """Return float32 keys or values as the float16 of a plane: no subnormals, no negative zero, no infinity."""
    y = ar.select(ar.absolute(x) < PLANE_SMALLEST, ar.zeros(tuple(x.shape)), x)
    return ar.to_float16(ar.minimum(ar.maximum(y, -PLANE_LARGEST), PLANE_LARGEST))


def head_group(head_dim: int) -> int:
    """Return how many components of a head share one exponent in queries and keys.

    >>> [head_group(size) for size in (256, 128, 96, 80, 64, 32)]
    [64, 64, 32, 16, 64, 32]
    """
    return math.gcd(head_dim, HEAD_GROUP)


@dataclass(frozen=True, eq=False)
class Integers:
    """Keys or values of some tokens as integers: `high` and `low` float32 `[T, kv_heads, groups, group]`, `exponents`
    int32 `[T, kv_heads, groups, 1]`. A value is (high * 64 + low) * 2 ** exponent.
    """

    high: Array
    low: Array
    exponents: Array


def key_integers(ar: Arithmetic, keys: Array) -> Integers:
    """Return key planes `[T, kv_heads, head_dim]` in groups of `head_group`."""
    return _integers(ar, keys, head_group(keys.shape[-1]))


def value_integers(ar: Arithmetic, values: Array) -> Integers:
    """Return value planes `[T, kv_heads, head_dim]`, a head as one group."""
    return _integers(ar, values, values.shape[-1])


def _integers(ar: Arithmetic, x: Array, group: int) -> Integers:
    quantised = quantise(ar, ar.to_float32(x), group)
    return Integers(*limbs(ar, quantised.values), quantised.exponents)
