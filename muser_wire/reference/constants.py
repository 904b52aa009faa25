"""The numbers of the reference lane's rules. A change of any of them changes what every node computes.

docs/numerics.md explains them; clauses such as [N4] cite it. `muser_wire.numerics` digests `table()` into the lane's
identity.
"""

from __future__ import annotations

import struct
from typing import Any

RULES_VERSION = 1


def f32_of_bits(bits: int) -> float:
    """Return the float32 with these bits, as the Python float of the same value.

    >>> f32_of_bits(0x3F800000)
    1.0
    """
    value: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return value


INTEGER_BITS = 12
"""Magnitudes of quantised activations, queries, keys, values and attention weights are at most 2 ** 12 [N3]."""
LIMB_BITS = 6
"""Where a dot product must fit 24 bits, an integer is taken apart into high * 2 ** 6 + low."""
SMALLEST_EXPONENT = -38
"""No group has a smaller exponent: what lies below is 0, on devices that flush subnormals as on others."""
WEIGHT_GROUP = 32
"""Columns of a matrix that share one activation exponent [N4]. Weights have groups of this or of half of it."""
LANES = 64
"""Partial sums of a sum of squares [N5]."""

PLANE_SMALLEST = 2.0**-14
PLANE_LARGEST = 65504.0
HEAD_GROUP = 64
"""Head components that share one exponent: the greatest common divisor of this and the head's size [N7]."""
KEY_BLOCK = 64
"""Keys of one block; blocks are anchored at position 0 [N8]."""
HIDDEN_SCORE = -(2.0**100)
"""What stands for the score of a key that a query does not see."""
DENOMINATOR_BITS = 15
SMALLEST_PRODUCT_EXPONENT = -90
"""As `SMALLEST_EXPONENT`, of attention weights times powers of two."""
RESCALE_LIMIT = -120.0
"""A block whose maximum is further below the largest counts for nothing."""

LOG2_E = f32_of_bits(0x3FB8AA3B)
EXP2_LIMIT = 120.0
EXP2_BITS = (0x3C1D00AF, 0x3D64FD99, 0x3E7601BB, 0x3F317097, 0x3F800000)
"""Coefficients of 2 ** r for |r| <= 1/2, highest power first, as float32 bits [N6]."""
EXP2_COEFFICIENTS = tuple(f32_of_bits(bits) for bits in EXP2_BITS)
GELU_LINEAR = f32_of_bits(0x3FCC422A)
"""2 sqrt(2 / pi)."""
GELU_CUBIC = f32_of_bits(0x3D922279)
"""0.044715 * 2 sqrt(2 / pi)."""
LOG2_E_F64 = float.fromhex("0x1.71547652b82fep+0")
"""log2 e in float64: it is multiplied into the score's scale before that is rounded to float32."""


def table() -> dict[str, Any]:
    """Return every constant by name, as JSON values; floats as hexadecimal text, so that no printing rounds them."""
    names = sorted(name for name in globals() if name.isupper())
    return {name.lower(): _plain(globals()[name]) for name in names}


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.hex() if isinstance(value, float) else value
