"""Linear layers against the rule written once more, a number at a time."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from muser_wire.reference.linear import IntegerWeight, linear, linear_arrays, quantised_input
from muser_wire.reference.numpy_arithmetic import NumpyArithmetic

AR = NumpyArithmetic()


def rounded(x: Fraction) -> Fraction:
    """The nearest float32, through float64: exact there, because every term has at most 48 bits."""
    as_double = float(x)
    assert Fraction(as_double) == x
    return Fraction(float(np.float32(as_double)))


@pytest.mark.parametrize(("group", "offset"), [(32, True), (32, False), (16, False)])
def test_an_output_is_the_chain_of_the_rule(group: int, offset: bool) -> None:
    rng = np.random.default_rng(group + offset)
    x = (rng.standard_normal((2, 128)) * 2).astype(np.float32)
    q = rng.integers(-128, 128, (5, 128 // group, group)).astype(np.int8)
    s, m = (rng.standard_normal((5, 128 // group)).astype(np.float16).astype(np.float32) for _ in "sm")
    weight = IntegerWeight(q, s, m if offset else None)
    quantised = quantised_input(AR, x)
    got = linear(AR, quantised, linear_arrays(AR, weight))
    for t in range(2):
        for n in range(5):
            a = Fraction(0)
            for g in range(128 // group):
                at = g * group // 32
                unit = Fraction(2) ** int(quantised.exponents[t, at, 0])
                codes = quantised.values[t].reshape(-1, group)[g]
                dot = sum(int(c) * int(w) for c, w in zip(codes, q[n, g], strict=True)) * unit
                term = rounded(Fraction(float(s[n, g])) * dot)
                if offset:
                    term = rounded(term + rounded(Fraction(float(m[n, g])) * sum(int(c) for c in codes) * unit))
                a = rounded(a + term)
            assert Fraction(float(got[t, n])) == a


def test_it_is_the_product_but_for_rounding() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 256)).astype(np.float32)
    weight = IntegerWeight(
        rng.integers(0, 16, (20, 8, 32)).astype(np.int8),
        rng.uniform(0.001, 0.01, (20, 8)).astype(np.float32),
        rng.uniform(-0.1, 0, (20, 8)).astype(np.float32),
    )
    assert (weight.rows, weight.group, weight.columns) == (20, 32, 256)
    wanted = x.astype(np.float64) @ weight.values().T.astype(np.float64)
    got = linear(AR, quantised_input(AR, x), linear_arrays(AR, weight))
    # 12 bits of each group of 32.
    assert np.abs(got - wanted).max() < 2**-11 * np.abs(wanted).max()
