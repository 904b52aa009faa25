"""Planes: what travels, and the integers behind it."""

from __future__ import annotations

import numpy as np

from muser_wire.reference.numpy_arithmetic import NumpyArithmetic
from muser_wire.reference.planes import head_group, key_integers, plane, value_integers

AR = NumpyArithmetic()


def test_a_plane_has_no_subnormals_no_infinities_and_one_zero() -> None:
    edge = np.float32(2.0**-14)
    x = np.array(
        [0.0, -0.0, edge, -edge, np.nextafter(edge, np.float32(0)), 65504, 65520, 1e9, -1e9, 1.0009765], np.float32
    )
    wanted = [0, 0, 2.0**-14, -(2.0**-14), 0, 65504, 65504, 65504, -65504, 1.0009765625]
    got = plane(AR, x)
    assert got.dtype == np.float16
    assert got.tolist() == wanted
    assert not np.signbit(got[[1, 4]]).any()


def test_head_groups() -> None:
    assert {size: head_group(size) for size in (16, 32, 64, 80, 96, 128, 256)} == {
        16: 16,
        32: 32,
        64: 64,
        80: 16,
        96: 32,
        128: 64,
        256: 64,
    }


def test_integers_come_back_within_half_a_unit() -> None:
    x = plane(AR, np.random.default_rng(5).standard_normal((7, 2, 128)).astype(np.float32))
    for made, groups in ((key_integers(AR, x), 2), (value_integers(AR, x), 1)):
        assert made.high.shape == (7, 2, groups, 128 // groups)
        unit = np.exp2(made.exponents.astype(np.float64))
        back = (made.high.astype(np.float64) * 64 + made.low) * unit
        assert (np.abs(back.reshape(x.shape) - x) <= np.broadcast_to(unit, back.shape).reshape(x.shape) / 2).all()
