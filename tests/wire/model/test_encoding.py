"""Matrices as blocks: read back by the `gguf` package, near to what they were."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType, dequantize

from muser_wire.model.encoding import BLOCKS, encode

MATRIX = np.random.default_rng(8).standard_normal((6, 512)).astype(np.float32)


def back(values: np.ndarray, encoding: str) -> np.ndarray:
    return dequantize(encode(values, encoding), GGMLQuantizationType[encoding])


@pytest.mark.parametrize(("encoding", "error"), [("Q8_0", 0.006), ("Q4_0", 0.09), ("Q4_K", 0.08)])
def test_values_come_back_near(encoding: str, error: float) -> None:
    assert set(BLOCKS) == {"Q8_0", "Q4_0", "Q4_K"}
    difference = back(MATRIX, encoding) - MATRIX
    assert 0 < np.sqrt(np.mean(difference**2)) < error


def test_q4_k_keeps_zeros_constants_and_small_rows() -> None:
    rows = np.zeros((4, 256), np.float32)
    rows[1] = 1.0
    rows[2] = -0.25
    rows[3] = np.linspace(0, 1e-4, 256)
    got = back(rows, "Q4_K")
    assert (got[0] == 0).all()
    assert np.allclose(got[1:3], rows[1:3], rtol=0.01)
    assert np.abs(got[3] - rows[3]).max() < 2e-5
    assert np.isfinite(got).all()


def test_q4_k_uses_each_group_s_own_range() -> None:
    rows = MATRIX[:, :256] * np.repeat(np.float32(2.0) ** np.arange(8, dtype=np.float32), 32)
    difference = (back(rows, "Q4_K") - rows).reshape(6, 8, 32)
    spread = rows.reshape(6, 8, 32).std(-1)
    # A scale of 6 bits leaves the smallest groups a coarse step; the others have their own.
    assert (np.sqrt(np.mean(difference[:, 5:] ** 2, axis=-1)) < 0.15 * spread[:, 5:]).all()
