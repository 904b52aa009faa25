from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from muser_decode.reference.vectors import LARGEST_CONSTANT, Constant, Exp2, Norm, Pointwise, Quantiser
from muser_wire.model.spec import Activation
from muser_wire.reference.exp2 import activated, softcapped
from muser_wire.reference.norm import rms_norm
from muser_wire.reference.numpy_arithmetic import NumpyArithmetic
from muser_wire.reference.tiny import random_spec

NUMPY = NumpyArithmetic()


def numbers(shape: tuple[int, ...], low: int, high: int) -> np.ndarray:
    rng = np.random.default_rng(sum(shape))
    return (rng.standard_normal(shape) * np.exp2(rng.integers(low, high, shape))).astype(np.float32)


def test_a_constant_has_the_shape_it_is_asked_for_unless_that_is_large() -> None:
    constant = Constant(0.5)
    assert np.array(constant.like(mx.zeros((2, 3)))).tolist() == [[0.5] * 3] * 2
    assert constant.like(mx.zeros((2, 3))) is constant.like(mx.ones((2, 3)))
    assert constant.like(mx.zeros((LARGEST_CONSTANT + 1,))).shape == ()


@pytest.mark.parametrize("bits", [3, 12])
def test_integers_times_powers_of_two(bits: int) -> None:
    x = numbers((40, 32), -50, 20)
    x[0], x[1] = 0, 0
    x[1, 3] = -np.float32(1.9999999)
    scales = Quantiser(bits, -38).scales(mx.array(x))
    up, down = np.array(scales.up), np.array(scales.down)
    exponents = np.floor(np.log2(np.maximum(np.abs(x).max(axis=1), 2.0**-38)))
    np.testing.assert_array_equal(up[:, 0], 2.0 ** (bits - 1 - exponents))
    np.testing.assert_array_equal(up * down, np.ones_like(up))
    assert np.abs(np.rint(x * up)).max() == 2**bits
    given = Quantiser(bits, -38).scales_of_largest(mx.max(mx.abs(mx.array(x)), axis=-1, keepdims=True))
    np.testing.assert_array_equal(np.array(given.up), up)


@pytest.mark.parametrize("exponent", [0, 15])
def test_powers_of_two(exponent: int) -> None:
    y = np.linspace(-104, 104, 4001, dtype=np.float32)
    got = np.array(Exp2(exponent)(mx.array(y))).astype(np.float64)
    np.testing.assert_allclose(got, np.exp2(y.astype(np.float64) + exponent), rtol=4e-6)
    whole = np.arange(-100, 101, dtype=np.float32)
    np.testing.assert_array_equal(np.array(Exp2(exponent)(mx.array(whole))), np.exp2(whole + exponent))


@pytest.mark.parametrize("activation", Activation)
def test_functions_give_the_bytes_of_the_rules(activation: Activation) -> None:
    seed = next(
        seed for seed in range(99) if random_spec(seed).activation is activation and random_spec(seed).logit_softcap
    )
    spec = random_spec(seed)
    pointwise, gate, up = Pointwise(spec), numbers((3, 500), -12, 8), numbers((3, 500), -4, 4)
    got = np.array(pointwise.activated(mx.array(gate), mx.array(up)))
    np.testing.assert_array_equal(got, activated(NUMPY, gate, up, activation))
    scaled = gate if spec.logit_scale == 1.0 else gate * np.float32(spec.logit_scale)
    assert spec.logit_softcap is not None
    np.testing.assert_array_equal(
        np.array(pointwise.logits(mx.array(gate))), softcapped(NUMPY, scaled, spec.logit_softcap)
    )


@pytest.mark.parametrize("size", [16, 64, 80, 576])
@pytest.mark.parametrize("weighted", [False, True])
def test_norms_give_the_bytes_of_the_rules(size: int, weighted: bool) -> None:
    x, w = numbers((2, 5, size), -9, 4), numbers((size,), -1, 1)
    norm = Norm(mx.array(w) if weighted else None, size, 2.0**-17)
    np.testing.assert_array_equal(np.array(norm(mx.array(x))), rms_norm(NUMPY, x, w if weighted else None, 2.0**-17))
