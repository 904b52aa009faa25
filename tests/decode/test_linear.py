from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from muser_decode import linear
from muser_decode.errors import ModelNotSupported
from muser_decode.linear import BlockScaled, Joined, Linear, Packed, Rows, Tiles, dense, pack, packed
from muser_wire.model.blockscaled import MODES, BlockScaledWeight
from muser_wire.model.encodings import AffineWeight
from muser_wire.numerics import budget

IN = 96


@dataclass
class Matrix:
    """A weight in memory: what `Weight` offers to a layout. `bits` 0 is a weight that has no packed form."""

    rows: int
    bits: int
    seed: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, IN

    def block_scaled(self) -> None:
        return None

    def affine(self) -> AffineWeight | None:
        if self.bits == 0:
            return None
        random = np.random.default_rng(self.seed)
        q = random.integers(0, 1 << self.bits, (self.rows, IN), dtype=np.uint8)
        # Values that float16 holds exactly, as a file's do.
        scales = (random.integers(10, 2000, (self.rows, IN // 32)) / 10_240 / (1 << self.bits)).astype(np.float16)
        offsets = (-random.integers(1, 200, (self.rows, IN // 32)) / 2048).astype(np.float16)
        return AffineWeight(self.bits, q, scales.astype(np.float32), offsets.astype(np.float32))

    def f32(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        weight = self.affine()
        if weight is None:
            random = np.random.default_rng(self.seed)
            return (random.standard_normal((self.rows, IN)) / 8).astype(np.float32)[start:stop]
        groups = weight.q.reshape(self.rows, IN // 32, 32).astype(np.float32)
        return (groups * weight.scales[..., None] + weight.offsets[..., None]).reshape(self.rows, IN)[start:stop]


@dataclass
class Codes(Matrix):
    """A block-scaled weight, quantised by mlx itself; `factor` is that of the whole tensor."""

    mode: str
    factor: float = 1.0

    def affine(self) -> None:
        return None

    def block_scaled(self) -> BlockScaledWeight:
        codes, scales = mx.quantize(mx.array(self._plain()), mode=self.mode)
        return BlockScaledWeight(MODES[self.mode], np.array(codes), np.array(scales), self.factor)

    def f32(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        codes, scales = mx.quantize(mx.array(self._plain()), mode=self.mode)
        values = mx.dequantize(codes, scales, mode=self.mode, dtype=mx.float32)
        return (np.array(values) * np.float32(self.factor))[start:stop]

    def _plain(self) -> np.ndarray:
        random = np.random.default_rng(self.seed)
        return (random.standard_normal((self.rows, IN)) / 8 / self.factor).astype(np.float32)


def inputs(tokens: int) -> np.ndarray:
    return np.random.default_rng(9).standard_normal((tokens, IN)).astype(np.float32)


def product(x: np.ndarray, matrices: list[Matrix]) -> np.ndarray:
    return x.astype(np.float64) @ np.concatenate([m.f32() for m in matrices]).astype(np.float64).T


def error(y: mx.array, expected: np.ndarray) -> float:
    assert y.shape == expected.shape
    return float(np.abs(np.array(y.astype(mx.float32)) - expected).max())


@pytest.fixture(params=[Rows, Tiles])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `dense` builds for either device; blocks of 64 rows."""
    monkeypatch.setattr(linear, "on_gpu", lambda: request.param is Rows)
    monkeypatch.setattr(linear, "BLOCK_NBYTES", 1)
    return request.param


def built(layout: Any, *matrices: Matrix, dtype: mx.Dtype = mx.float32) -> Linear:
    matrix = dense(list(matrices), dtype)
    assert isinstance(matrix, layout)
    return matrix


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_dense_layouts_multiply(layout: Any, rows: int, tokens: int) -> None:
    matrix = Matrix(rows, 0, seed=1)
    y = built(layout, matrix)(mx.array(inputs(tokens)))
    assert error(y, product(inputs(tokens), [matrix])) <= budget("planes_f32")


@pytest.mark.parametrize("tokens", [1, 3])
def test_dense_layouts_add_to_a_residual(layout: Any, tokens: int) -> None:
    matrix = Matrix(80, 0, seed=1)
    residual = np.random.default_rng(4).standard_normal((tokens, 80)).astype(np.float32)
    given = mx.array(residual)
    y = built(layout, matrix).added(given, mx.array(inputs(tokens)))
    assert error(y, product(inputs(tokens), [matrix]) + residual) <= budget("planes_f32")
    np.testing.assert_array_equal(np.array(given), residual)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_dense_layouts_give_rows_exactly(layout: Any, dtype: mx.Dtype) -> None:
    matrix = Matrix(200, 0, seed=2)
    ids = [0, 63, 64, 199, 64]
    rows = built(layout, matrix, dtype=dtype).rows(mx.array(ids))
    assert rows.dtype == dtype
    assert mx.array_equal(rows, mx.array(matrix.f32()[ids]).astype(dtype))


@pytest.mark.parametrize("columns", [64, 576, 1_536, 2_048, 20_000])
@pytest.mark.parametrize("rows", [2, 7, 8, 11, 28, 29, 64])
def test_rows_of_several_requests_are_each_what_they_are_alone(columns: int, rows: int) -> None:
    """A large product is added up in another order, so many rows are multiplied by the kernel of few."""
    random = np.random.default_rng(columns)
    tiles = mx.array(random.standard_normal((2, columns, 64)).astype(np.float32))
    x = random.standard_normal((rows, columns)).astype(np.float32)
    matrix = Tiles(tiles, 100)
    together = np.array(matrix(mx.array(x), apart=True))
    alone = np.concatenate([np.array(matrix(mx.array(row[None]))) for row in x])
    np.testing.assert_array_equal(together, alone)
    expected = x.astype(np.float64) @ np.array(tiles, np.float64).transpose(1, 0, 2).reshape(columns, 128)[:, :100]
    assert np.abs(together - expected).max() <= budget("logits_f32") * np.sqrt(columns)


@pytest.mark.parametrize("rows", [64, 100, 320])
def test_tiles_lie_as_they_are_read(rows: int) -> None:
    """A view in another order gives the same numbers at two thirds of the speed."""
    matrix = dense([Matrix(rows, 0, 1)], mx.float32)
    assert isinstance(matrix, Tiles)
    (tiles,) = (value for value in vars(matrix).values() if isinstance(value, mx.array))
    assert memoryview(tiles).c_contiguous


def test_matrices_of_any_height_lie_one_below_the_other(layout: Any) -> None:
    matrices = [Matrix(rows, 0, seed=rows) for rows in (70, 1, 130, 64, 5)]
    rows = built(layout, *matrices).rows(mx.arange(270))
    np.testing.assert_array_equal(np.array(rows), np.concatenate([matrix.f32() for matrix in matrices]))


def test_loading_needs_little_more_memory_than_the_matrix(layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "BLOCK_NBYTES", 64 << 10)
    matrix = Matrix(20_000, 0, seed=3)
    values = matrix.f32()
    monkeypatch.setattr(Matrix, "f32", lambda self, start, stop: values[start:stop])
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    kept = built(layout, matrix)
    assert mx.get_peak_memory() - before < 1.1 * values.nbytes
    del kept


@pytest.mark.parametrize("bits", [4, 5, 8])
def test_pack_is_one_little_endian_stream_of_bits(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q = np.random.default_rng(3).integers(0, 1 << bits, (150, 64), dtype=np.uint8)
    monkeypatch.setattr(linear, "BLOCK_NBYTES", 1)
    words = pack(q, bits)
    assert words.dtype == np.uint32
    assert words.shape == (150, 64 * bits // 32)
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


def test_scales_that_bfloat16_holds_are_packed_in_it() -> None:
    """As MLX's own quantised checkpoints have them."""

    class Rounded(Matrix):
        def affine(self) -> AffineWeight:
            weight = super().affine()
            assert weight is not None
            ones = np.ones_like(weight.scales)
            return AffineWeight(weight.bits, weight.q, ones / 16, -ones)

    rows = packed([Rounded(8, 4, seed=1)], mx.bfloat16).rows(mx.array([3]))
    assert rows.dtype == mx.bfloat16


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("factors", [(1.0, 1.0), (0.25, 0.25), (3e-4, 0.002)])
@pytest.mark.parametrize("tokens", [1, 5])
def test_block_scaled_codes_multiply_like_the_dense_weights(
    mode: str, factors: tuple[float, float], tokens: int
) -> None:
    matrices: list[Matrix] = [
        Codes(rows, 0, seed=rows, mode=mode, factor=factor) for rows, factor in zip((40, 24), factors, strict=True)
    ]
    layout = packed(matrices, mx.float32)
    assert isinstance(layout, BlockScaled)
    assert error(layout(mx.array(inputs(tokens))), product(inputs(tokens), matrices)) <= budget("planes_f32")
    rows = layout.rows(mx.array([0, 39, 40, 63]))
    expected = np.concatenate([matrix.f32() for matrix in matrices])[[0, 39, 40, 63]]
    assert error(rows, expected.astype(np.float64)) <= budget("planes_f32")


def test_block_scaled_codes_keep_the_compute_type_and_their_factor_s_precision() -> None:
    # 1 / 3 in bfloat16 is 0.1 % off; a row of the matrix shows it, but for its own rounding to 8 bits.
    matrix = Codes(16, 0, seed=1, mode="nvfp4", factor=1 / 3)
    rows = packed([matrix], mx.bfloat16).rows(mx.arange(16))
    assert rows.dtype == mx.bfloat16
    assert mx.array_equal(rows, mx.array(matrix.f32()).astype(mx.bfloat16))
    assert packed([matrix], mx.bfloat16)(mx.ones((1, IN), mx.bfloat16)).dtype == mx.bfloat16


def test_block_scaled_codes_with_a_factor_refuse_float16() -> None:
    with pytest.raises(ModelNotSupported, match="NVFP4 with a factor of the tensor overflows float16"):
        packed([Codes(16, 0, seed=1, mode="nvfp4", factor=0.5)], mx.float16)
    assert isinstance(packed([Codes(16, 0, seed=1, mode="mxfp4")], mx.float16), BlockScaled)
