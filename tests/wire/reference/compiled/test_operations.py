"""The kernels' results are tested where both of their callers are: tests/prefill/kernels/exact and tests/decode."""

from __future__ import annotations

import numpy as np
import pytest
from exact_kernels import matrix

from muser_wire.reference.compiled.operations import panels
from muser_wire.reference.linear import IntegerWeight


def test_panels_hold_every_weight_once_and_zeros_beside() -> None:
    weight = matrix(np.random.default_rng(2), 37, 64, 1)
    made = panels(weight)
    assert made.weights.shape == (2, 32, 32, 2)
    assert made.scales.shape == made.offsets.shape == (2, 2, 32)
    for row, column in ((0, 0), (31, 63), (32, 1), (36, 40)):
        assert made.weights[row // 32, column // 2, row % 32, column % 2] == weight.q[row, column // 32, column % 32]
        assert made.scales[row // 32, column // 32, row % 32] == weight.s[row, column // 32]
        assert made.offsets[row // 32, column // 32, row % 32] == weight.m[row, column // 32]
    assert not made.weights[1, :, 5:].any()


def test_offsets_of_groups_of_16_are_refused() -> None:
    weight = matrix(np.random.default_rng(3), 4, 32, 2)
    with pytest.raises(ValueError, match="groups of 16"):
        panels(IntegerWeight(weight.q, weight.s, weight.s))
