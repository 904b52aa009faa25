"""RMSNorm: its order, and its value."""

from __future__ import annotations

import numpy as np
import pytest

from muser_wire.reference.norm import lane_sum, rms_norm
from muser_wire.reference.numpy_arithmetic import NumpyArithmetic

AR = NumpyArithmetic()


@pytest.mark.parametrize("size", [16, 64, 65, 576, 640])
def test_the_sum_has_the_written_order(size: int) -> None:
    x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    lanes = [np.float32(0)] * 64
    for index in range(-(-size // 64) * 64):
        lanes[index % 64] = lanes[index % 64] + (x[index] if index < size else np.float32(0))
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [a + b for a, b in zip(lanes[:half], lanes[half:], strict=True)]
    assert lane_sum(AR, x[None]).tolist() == [[float(lanes[0])]]


def test_it_normalises() -> None:
    x = np.random.default_rng(1).standard_normal((3, 96)).astype(np.float32) * np.float32(5)
    w = np.linspace(0.5, 2, 96).astype(np.float32)
    wanted = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5)
    assert np.allclose(rms_norm(AR, x, None, 1e-5), wanted, rtol=1e-6)
    assert np.allclose(rms_norm(AR, x, w, 1e-5), wanted * w, rtol=1e-6)
