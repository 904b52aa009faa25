"""Rotary positions [N5]: tables of cosine and sine made of exact and IEEE steps alone: no platform's libm matters.

Frequencies are correctly rounded float64 numbers. An angle is a fraction of a turn in 64-bit fixed point, so position
times frequency wraps around exactly; sine and cosine are polynomials in float64 within an eighth of a turn.
"""

from __future__ import annotations

import decimal
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from muser_wire.model.spec import RopeSpec
from muser_wire.reference.arithmetic import Arithmetic, Array

PI = decimal.Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
DIGITS = 50
HIGHEST_POWER = 17
"""Of the polynomials: the next term is below 2 ** -53 at an eighth of a turn."""
OCTANT_BITS = 61
RADIANS_OF_UNIT = float(2 * PI / 2**53)
"""The angle, in radians, of one unit once 11 low bits are dropped so that float64 holds a phase exactly."""


@dataclass(frozen=True, eq=False)
class RopeTable:
    """Cosines and sines `[positions, rotary_dim / 2]`, float32."""

    cos: npt.NDArray[np.float32]
    sin: npt.NDArray[np.float32]


def rope_table(rope: RopeSpec, first: int, stop: int) -> RopeTable:
    """Return the table of positions `first` up to `stop`, which is not among them."""
    steps = np.array([_turn_units(frequency) for frequency in frequencies(rope)], np.uint64)
    # Unsigned products wrap modulo 2 ** 64, which is one turn.
    phases = np.arange(first, stop, dtype=np.uint64)[:, None] * steps[None, :]
    return RopeTable(*_cos_sin(phases))


def frequencies(rope: RopeSpec) -> tuple[float, ...]:
    """Return each pair's radians per position: theta ** (-2 i / rotary_dim) correctly rounded, then scaled."""
    with decimal.localcontext() as context:
        context.prec = DIGITS
        theta = decimal.Decimal(rope.theta)
        plain = [float(theta ** (decimal.Decimal(-2 * i) / rope.rotary_dim)) for i in range(rope.rotary_dim // 2)]
    return tuple(plain if rope.scaling is None else map(rope.scaling.scaled, plain))


def _turn_units(frequency: float) -> int:
    """Return an angle in units of 2 ** -64 turns, modulo one turn."""
    with decimal.localcontext() as context:
        context.prec = DIGITS
        units = decimal.Decimal(frequency) / (2 * PI) * 2**64
        return int(units.to_integral_value(decimal.ROUND_HALF_EVEN)) % 2**64


def _cos_sin(phases: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return cosine and sine of phases in units of 2 ** -64 turns, computed in float64 and rounded to float32.

    In octant k the phase is k / 8 turns plus a rest; in odd octants the angle is taken back from the octant's end.
    """
    octants = phases >> np.uint64(OCTANT_BITS)
    rest = phases & np.uint64((1 << OCTANT_BITS) - 1)
    odd = (octants & np.uint64(1)) == 1
    rest = np.where(odd, np.uint64(1 << OCTANT_BITS) - rest, rest)
    x = (rest >> np.uint64(11)).astype(np.float64) * RADIANS_OF_UNIT
    cos, sin = _polynomial(x, 0), _polynomial(x, 1)
    quarter = ((octants + np.uint64(1)) >> np.uint64(1)) & np.uint64(3)
    swapped = (quarter & np.uint64(1)) == 1
    # In an odd octant the rest counts backwards from the quarter's axis, so its sine is negative.
    sin = np.where(odd, -sin, sin)
    cos, sin = np.where(swapped, -sin, cos), np.where(swapped, cos, sin)
    opposite = quarter >= 2
    cos, sin = np.where(opposite, -cos, cos), np.where(opposite, -sin, sin)
    return _float32(cos), _float32(sin)


def _polynomial(x: npt.NDArray[np.float64], first: int) -> npt.NDArray[np.float64]:
    """Return the Taylor polynomial of the cosine (`first` 0) or the sine (1), by Horner's rule in x * x."""
    square = x * x
    powers = range(first + (HIGHEST_POWER - first) // 2 * 2, first - 1, -2)
    result = np.zeros_like(x)
    for power in powers:
        sign = -1.0 if (power // 2) % 2 else 1.0
        result = result * square
        result = result + sign / math.factorial(power)
    return result if first == 0 else result * x


def _float32(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    # Adding +0 makes a negative zero positive.
    return np.asarray((x + 0.0).astype(np.float32))


def rotated(ar: Arithmetic, x: Array, cos: Array, sin: Array) -> Array:
    """Return `x [T, heads, head_dim]` rotated by tables `[T, 1, rotary_dim / 2]`; components past rotary_dim stay.

    Pair i is (a, b) = (x[i], x[i + rotary_dim / 2]); it becomes (a * cos - b * sin, a * sin + b * cos).
    """
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    ac, bs, as_, bc = a * cos, b * sin, a * sin, b * cos
    parts = [ac - bs, as_ + bc]
    return ar.concatenate([*parts, rest] if rest.shape[-1] else parts, -1)
