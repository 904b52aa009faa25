"""Numpy's steps against exact values: integers of Python, fractions, and float64."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from muser_wire.reference.numpy_arithmetic import NumpyArithmetic


def test_reciprocals_and_roots_are_the_nearest() -> None:
    ar = NumpyArithmetic()
    x = np.random.default_rng(1).uniform(1, 4, 300).astype(np.float32)
    for value, inverse, root in zip(x, ar.reciprocal(x), ar.sqrt(x), strict=True):
        exact = Fraction(float(value))
        steps = [np.nextafter(inverse, np.float32(to)) for to in (0, 10)]
        assert all(abs(Fraction(float(inverse)) * exact - 1) <= abs(Fraction(float(s)) * exact - 1) for s in steps)
        # A root lies between the midpoints to its neighbours.
        low, high = (Fraction(float(np.nextafter(root, np.float32(to)))) for to in (0, 10))
        middle = Fraction(float(root))
        assert ((low + middle) / 2) ** 2 <= exact <= ((middle + high) / 2) ** 2


@pytest.mark.parametrize("wide", [np.int64, np.float64])
def test_dots_at_the_bound_are_exact(wide: type) -> None:
    ar = NumpyArithmetic(wide)
    a = np.full((1, 64), 4096, np.float32)
    a[0, ::3] = -4095
    b = np.full((64, 1), 64, np.float32)
    exact = sum(int(x) * 64 for x in a[0])
    assert ar.integer_dot(a, b)[0, 0] == exact
    assert ar.integer_dot(np.abs(a) * 0 + 4096, b)[0, 0] == 1 << 24


def test_halves_round_to_even_and_sums_are_exact() -> None:
    ar = NumpyArithmetic()
    assert ar.rint(np.array([0.5, 1.5, -0.5, -1.5, 2.5], np.float32)).tolist() == [0, 2, 0, -2, 2]
    assert ar.integer_sum(np.array([[4096] * 4095 + [1]], np.float32)).tolist() == [[4096 * 4095 + 1]]
    assert ar.to_float32(np.array([16777217, 16777219], np.int32)).tolist() == [16777216, 16777220]
