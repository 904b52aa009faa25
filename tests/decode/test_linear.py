from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from muser_decode.errors import ModelNotSupported
from muser_decode.linear import Joined, Packed, Rows, Tiles, dense, pack, packed
from muser_wire.model.encodings import AffineWeight
from muser_wire.numerics import budget

IN = 96


@dataclass
class Matrix:
    """A weight in memory: what `Weight` offers to a layout. `bits` 0 is a weight that has no packed form."""

    rows: int
    bits: int
    seed: int

    def affine(self) -> AffineWeight | None:
        if self.bits == 0:
            return None
        random = np.random.default_rng(self.seed)
        q = random.integers(0, 1 << self.bits, (self.rows, IN), dtype=np.uint8)
        # Values that float16 holds exactly, as a file's do.
        scales = (random.integers(1, 200, (self.rows, IN // 32)) / 1024 / (1 << self.bits)).astype(np.float16)
        offsets = (-random.integers(1, 200, (self.rows, IN // 32)) / 2048).astype(np.float16)
        return AffineWeight(self.bits, q, scales.astype(np.float32), offsets.astype(np.float32))

    def f32(self) -> np.ndarray:
        weight = self.affine()
        if weight is None:
            random = np.random.default_rng(self.seed)
            return (random.standard_normal((self.rows, IN)) / 8).astype(np.float32)
        groups = weight.q.reshape(self.rows, IN // 32, 32).astype(np.float32)
        return (groups * weight.scales[..., None] + weight.offsets[..., None]).reshape(self.rows, IN)


def inputs(tokens: int) -> np.ndarray:
    return np.random.default_rng(9).standard_normal((tokens, IN)).astype(np.float32)


def product(x: np.ndarray, matrices: list[Matrix]) -> np.ndarray:
    return x.astype(np.float64) @ np.concatenate([m.f32() for m in matrices]).astype(np.float64).T


def error(y: mx.array, expected: np.ndarray) -> float:
    assert y.shape == expected.shape
    return float(np.abs(np.array(y.astype(mx.float32)) - expected).max())


@pytest.mark.parametrize("layout", [Rows, Tiles])
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_dense_layouts_multiply(layout: Any, rows: int, tokens: int) -> None:
    matrix = Matrix(rows, 0, seed=1)
    y = layout(mx.array(matrix.f32()))(mx.array(inputs(tokens)))
    assert error(y, product(inputs(tokens), [matrix])) <= budget("planes_f32")


@pytest.mark.parametrize("layout", [Rows, Tiles])
@pytest.mark.parametrize("tokens", [1, 3])
def test_dense_layouts_add_to_a_residual(layout: Any, tokens: int) -> None:
    matrix = Matrix(80, 0, seed=1)
    residual = np.random.default_rng(4).standard_normal((tokens, 80)).astype(np.float32)
    given = mx.array(residual)
    y = layout(mx.array(matrix.f32())).added(given, mx.array(inputs(tokens)))
    assert error(y, product(inputs(tokens), [matrix]) + residual) <= budget("planes_f32")
    np.testing.assert_array_equal(np.array(given), residual)


@pytest.mark.parametrize("layout", [Rows, Tiles])
def test_dense_layouts_give_rows_exactly(layout: Any) -> None:
    weight = Matrix(200, 0, seed=2).f32()
    ids = [0, 63, 64, 199, 64]
    np.testing.assert_array_equal(np.array(layout(mx.array(weight)).rows(mx.array(ids))), weight[ids])


@pytest.mark.parametrize("bits", [4, 5, 8])
def test_pack_is_one_little_endian_stream_of_bits(bits: int) -> None:
    q = np.random.default_rng(3).integers(0, 1 << bits, (5, 64), dtype=np.uint8)
    words = pack(q, bits)
    assert words.dtype == np.uint32
    assert words.shape == (5, 64 * bits // 32)
    for row, packed_row in zip(q, words, strict=True):
        stream = sum(int(value) << (bits * place) for place, value in enumerate(row))
        assert int.from_bytes(packed_row.astype("<u4").tobytes(), "little") == stream


@pytest.mark.parametrize("bits", [4, 5, 8])
@pytest.mark.parametrize("tokens", [1, 5])
def test_packed_multiplies_like_the_dense_weights(bits: int, tokens: int) -> None:
    matrices = [Matrix(40, bits, seed=4), Matrix(24, bits, seed=5)]
    layout = packed(matrices, mx.float32)
    assert isinstance(layout, Packed)
    assert error(layout(mx.array(inputs(tokens))), product(inputs(tokens), matrices)) <= budget("logits_packed")


@pytest.mark.parametrize("bits", [4, 5, 8])
def test_packed_gives_rows(bits: int) -> None:
    matrix = Matrix(40, bits, seed=6)
    ids = [0, 39, 7]
    rows = packed([matrix], mx.float32).rows(mx.array(ids))
    assert error(rows, matrix.f32()[ids].astype(np.float64)) <= budget("planes_f32")


def test_packed_scales_stay_exact_in_float16() -> None:
    matrix = Matrix(40, 4, seed=6)
    rows = packed([matrix], mx.float16).rows(mx.array([3]))
    assert rows.dtype == mx.float16
    assert error(rows, matrix.f32()[[3]].astype(np.float64)) <= budget("planes_f16_kv")


def test_mixed_packings_are_joined_in_order() -> None:
    matrices = [Matrix(40, 4, seed=7), Matrix(24, 8, seed=8), Matrix(16, 0, seed=9)]
    layout = packed(matrices, mx.float32)
    assert isinstance(layout, Joined)
    assert error(layout(mx.array(inputs(2))), product(inputs(2), matrices)) <= budget("logits_packed")
    with pytest.raises(ModelNotSupported, match="joined"):
        layout.rows(mx.array([0]))


def test_weights_without_a_packed_form_become_dense() -> None:
    assert isinstance(packed([Matrix(8, 0, seed=1)], mx.float32), Rows | Tiles)
    assert isinstance(dense([Matrix(8, 4, seed=1)], mx.float32), Rows | Tiles)


def test_packed_refuses_a_type_that_rounds_the_scales() -> None:
    with pytest.raises(ModelNotSupported, match="bfloat16 rounds their scales"):
        packed([Matrix(8, 4, seed=1)], mx.bfloat16)
