"""Positions: tables without a libm, beside numbers of 60 digits and beside the platform's own."""

from __future__ import annotations

import decimal
from decimal import Decimal

import numpy as np
import pytest

from muser_wire.model.spec import LinearScaling, Llama3Scaling, RopeSpec
from muser_wire.reference.numpy_arithmetic import NumpyArithmetic
from muser_wire.reference.rope import PI, frequencies, rope_table, rotated

ROPE = RopeSpec(10000.0, 64)


def cosine(x: Decimal) -> tuple[Decimal, Decimal]:
    """Cosine and sine by their series, after taking away whole turns."""
    x = x % (2 * PI)
    term, total, sines, n = Decimal(1), Decimal(1), Decimal(0), 0
    while abs(term) > Decimal(10) ** -45:
        n += 1
        term = term * x / n
        sign = -1 if n % 4 in {2, 3} else 1
        if n % 2:
            sines += sign * term
        else:
            total += sign * term
    return total, sines


@pytest.mark.parametrize("position", [0, 1, 77, 4095, 131071])
def test_entries_are_the_nearest_float32(position: int) -> None:
    table = rope_table(ROPE, position, position + 1)
    with decimal.localcontext() as context:
        context.prec = 60
        for pair in (0, 1, 7, 20, 31):
            frequency = Decimal(float(Decimal(10000) ** (Decimal(-2 * pair) / 64)))
            exact = cosine(position * frequency)
            got = (table.cos[0, pair], table.sin[0, pair])
            for mine, wanted in zip(got, exact, strict=True):
                neighbours = [np.nextafter(mine, np.float32(to)) for to in (-2, 2)]
                assert all(abs(Decimal(float(mine)) - wanted) <= abs(Decimal(float(n)) - wanted) for n in neighbours)


def test_any_part_of_a_table_is_that_part() -> None:
    whole, part = rope_table(ROPE, 0, 300), rope_table(ROPE, 100, 200)
    assert (whole.cos[100:200] == part.cos).all()
    assert (whole.sin[100:200] == part.sin).all()


@pytest.mark.parametrize("scaling", [None, LinearScaling(8.0), Llama3Scaling(8.0, 1.0, 4.0, 256)])
def test_frequencies_are_those_of_the_spec(scaling: LinearScaling | Llama3Scaling | None) -> None:
    rope = RopeSpec(500000.0, 128, scaling)
    assert np.allclose(frequencies(rope), rope.inverse_frequencies(), rtol=4e-16, atol=0)


def test_pairs_turn_and_the_rest_stays() -> None:
    x = np.random.default_rng(3).standard_normal((5, 2, 24)).astype(np.float32)
    table = rope_table(RopeSpec(10000.0, 16), 3, 8)
    got = rotated(NumpyArithmetic(), x, table.cos[:, None], table.sin[:, None])
    complex_x = x[..., :8] + 1j * x[..., 8:16].astype(np.float64)
    angles = np.arange(3, 8)[:, None] * np.array(RopeSpec(10000.0, 16).inverse_frequencies())
    turned = complex_x * np.exp(1j * angles)[:, None]
    assert np.allclose(got[..., :8], turned.real, atol=1e-6)
    assert np.allclose(got[..., 8:16], turned.imag, atol=1e-6)
    assert (got[..., 16:] == x[..., 16:]).all()
