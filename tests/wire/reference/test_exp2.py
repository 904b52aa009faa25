"""2 ** x and what is made of it, beside float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

from muser_wire.model.spec import Activation
from muser_wire.reference.exp2 import activated, exp2, sigmoid, softcapped, tanh
from muser_wire.reference.numpy_arithmetic import NumpyArithmetic

AR = NumpyArithmetic()
X = np.random.default_rng(4).standard_normal(20000).astype(np.float32) * np.float32(6)
EXACT = X.astype(np.float64)


def test_powers_are_within_three_millionths() -> None:
    x = np.linspace(-119.9, 119.9, 99991).astype(np.float32)
    assert np.abs(exp2(AR, x) / np.exp2(x.astype(np.float64)) - 1).max() < 3e-6
    whole = np.arange(-120, 121, dtype=np.float32)
    assert (exp2(AR, whole) == np.exp2(whole)).all()
    assert exp2(AR, np.array([-1e30, 1e30], np.float32)).tolist() == [2.0**-120, 2.0**120]


def test_sigmoid_and_tanh() -> None:
    assert np.abs(sigmoid(AR, X) - 1 / (1 + np.exp(-EXACT))).max() < 1e-6
    assert np.abs(tanh(AR, X) - np.tanh(EXACT)).max() < 2e-6
    assert tanh(AR, np.zeros(1, np.float32)).tolist() == [0.0]


@pytest.mark.parametrize("kind", list(Activation))
def test_activations(kind: Activation) -> None:
    exact = {
        Activation.SILU: EXACT / (1 + np.exp(-EXACT)),
        Activation.GELU_TANH: 0.5 * EXACT * (1 + np.tanh(math.sqrt(2 / math.pi) * (EXACT + 0.044715 * EXACT**3))),
    }[kind]
    got = activated(AR, X, np.full_like(X, 2), kind)
    assert np.abs(got - 2 * exact).max() < 3e-6 * np.abs(exact).max()


def test_a_cap() -> None:
    assert np.abs(softcapped(AR, X * 5, 30.0) - 30 * np.tanh(EXACT * 5 / 30)).max() < 1e-4
