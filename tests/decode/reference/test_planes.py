from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from muser_decode.reference.planes import Derivation, PlaneRounding, PlaneShape
from muser_wire.reference.numpy_arithmetic import NumpyArithmetic
from muser_wire.reference.planes import head_group, key_integers, plane, value_integers
from muser_wire.reference.quantise import quantise

NUMPY = NumpyArithmetic()
HEADS, TOKENS = 2, 5


def numbers(*shape: int) -> np.ndarray:
    rng = np.random.default_rng(sum(shape))
    return (rng.standard_normal(shape) * np.exp2(rng.integers(-18, 6, shape))).astype(np.float32)


def test_rounding_leaves_no_subnormal_no_negative_zero_and_no_infinity() -> None:
    x = np.array([6.1e-5, 6.2e-5, -6.1e-5, -0.0, 7e4, -np.inf, 1 + 2**-11, 1 + 3 * 2**-11], np.float32)
    got = np.array(PlaneRounding()(mx.array(x)))
    expected = np.array([0, 6.2e-5, 0, 0, 65504, -65504, 1, 1 + 2**-9], np.float16)
    assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dim", [16, 64, 80, 128])
def test_integers_are_those_of_the_rules(dim: int) -> None:
    planes = plane(NUMPY, numbers(2 * HEADS, TOKENS, dim))
    queries = numbers(6, TOKENS, dim)
    derivation = Derivation(PlaneShape(HEADS, dim))
    rows, q = derivation.rows_and_queries(mx.array(planes), mx.array(queries))
    tokens_first = planes.swapaxes(0, 1)
    keys, values = key_integers(NUMPY, tokens_first[:, :HEADS]), value_integers(NUMPY, tokens_first[:, HEADS:])
    power = np.exp2(keys.exponents.astype(np.float64))
    for part, limb in enumerate((keys.high * 64.0, keys.low)):
        got = np.array(rows.seen.keys).reshape(HEADS, -1, 2, TOKENS, head_group(dim))[:, :, part]
        np.testing.assert_array_equal(got, (limb * power).transpose(1, 2, 0, 3))
    for part, limb in enumerate((values.high * 64.0, values.low)):
        np.testing.assert_array_equal(np.array(rows.seen.values)[:, part], limb[:, :, 0].swapaxes(0, 1))
    np.testing.assert_array_equal(np.array(rows.seen.powers)[..., 0], np.exp2(values.exponents[:, :, 0, 0].T))
    asked = quantise(NUMPY, queries, head_group(dim))
    expected = asked.values * np.exp2(asked.exponents.astype(np.float64))
    np.testing.assert_array_equal(np.array(q), expected.swapaxes(1, 2))
    for one, other in zip(rows.arrays(), derivation.rows(mx.array(planes)).arrays(), strict=True):
        np.testing.assert_array_equal(np.array(one), np.array(other))


def test_parts_of_rows_and_the_memory_of_one() -> None:
    shape = PlaneShape(HEADS, 80)
    arrays = shape.empty(7)
    assert sum(array.nbytes for array in arrays) == 7 * shape.row_nbytes
    rows = Derivation(shape).rows(mx.array(plane(NUMPY, numbers(2 * HEADS, TOKENS, 80))))
    part = rows.part(1, 4)
    assert (rows.tokens, part.tokens) == (TOKENS, 3)
    for whole, cut in zip(rows.arrays(), part.arrays(), strict=True):
        np.testing.assert_array_equal(np.array(whole)[..., 1:4, :], np.array(cut))
    assert rows.seen.part(0, TOKENS) is rows.seen
