"""Quantised vectors against Python's exact numbers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from muser_wire.reference.numpy_arithmetic import NumpyArithmetic
from muser_wire.reference.quantise import limbs, power_of_two, quantise

AR = NumpyArithmetic()


def test_a_group_is_integers_times_a_power_of_two() -> None:
    x = np.random.default_rng(2).standard_normal((3, 96)).astype(np.float32) * np.float32(7)
    result = quantise(AR, x, 32)
    assert result.values.shape == (3, 3, 32)
    for row, values, exponents in zip(
        x.reshape(9, 32), result.values.reshape(9, 32), result.exponents.ravel(), strict=True
    ):
        top = max(abs(Fraction(float(v))) for v in row)
        unit = Fraction(2) ** int(exponents)
        assert 2**11 <= top / unit < 2**12
        assert values.tolist() == [round(Fraction(float(v)) / unit) for v in row]


def test_edges() -> None:
    zero, tiny = quantise(AR, np.zeros((1, 32), np.float32), 32), np.full((1, 32), 2.0**-51, np.float32)
    assert zero.exponents.item() == -38 - 11
    assert not zero.values.any()
    # Half a unit of the smallest exponent rounds to even, which is 0.
    assert not quantise(AR, tiny * 2, 32).values.any()
    assert (quantise(AR, tiny * 3, 32).values == 1).all()
    almost_two = np.full((1, 32), np.nextafter(np.float32(2), np.float32(0)))
    assert (quantise(AR, almost_two, 32).values == 4096).all()
    assert quantise(AR, np.full((1, 32), 3.0e38, np.float32), 32).exponents.item() == 127 - 11


def test_limbs_are_small_and_make_the_whole() -> None:
    values = np.arange(-4096, 4097, dtype=np.float32)
    high, low = limbs(AR, values)
    assert (high * 64 + low == values).all()
    assert (np.abs(high).max(), np.abs(low).max()) == (64, 32)


def test_powers_of_two() -> None:
    assert power_of_two(AR, np.array([-126, 0, 127], np.int32)).tolist() == [2.0**-126, 1.0, 2.0**127]
