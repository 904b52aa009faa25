from __future__ import annotations

import numpy as np
import pytest

from muser_wire.model.blockscaled import (
    MXFP4,
    MXFP8,
    NVFP4,
    BlockMode,
    decode_block_scaled,
    e2m1_values,
    e4m3_values,
    e8m0_values,
)

# What MLX 0.32 makes of 32 numbers from -3 to 3 in even steps: words, scales, and its own dequantisation.
FOURS = [3740200959, 162249949, 1430467088, 2004248165]
HALF = [0.0, 0.25, 0.5, 0.75, 0.75, 1.0, 1.5, 1.5, 1.5, 2.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0]
EIGHTS = [4210752508, 4126669049, 4008833780, 3571574763, 1801937236, 1953657198, 2037938037, 2088467066]
EIGHTS_HALF = [0.09375, 0.28125, 0.46875, 0.6875, 0.875, 1.125, 1.25, 1.5, 1.625, 1.875, 2.0, 2.25, 2.5, 2.5, 2.75, 3.0]
MLX = [(NVFP4, FOURS, [48, 48], HALF), (MXFP4, FOURS, [126], HALF), (MXFP8, EIGHTS, [120], EIGHTS_HALF)]


@pytest.mark.parametrize(("mode", "words", "scales", "half"), MLX, ids=lambda value: getattr(value, "name", None))
def test_mlx_s_arrays_have_mlx_s_values(
    mode: BlockMode, words: list[int], scales: list[int], half: list[float]
) -> None:
    codes = np.array([words], "<u4").view(np.uint8)
    found = decode_block_scaled(mode, codes, np.array([scales], np.uint8))
    np.testing.assert_array_equal(found, [[*(-x for x in reversed(half)), *half]])


def test_every_e4m3_code_by_its_definition() -> None:
    for code in range(256):
        sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
        if code & 127 == 127:
            assert np.isnan(e4m3_values()[code])
            continue
        size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        assert e4m3_values()[code] == (-size if sign else size)


def test_every_e2m1_code_by_its_definition() -> None:
    for code in range(16):
        sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
        size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
        assert e2m1_values()[code] == (-size if sign else size)


def test_powers_of_two() -> None:
    assert [float(value) for value in e8m0_values()[[0, 1, 127, 254]]] == [2.0**-127, 2.0**-126, 1.0, 2.0**127]
    assert np.isnan(e8m0_values()[255])


def test_the_low_nibble_is_the_even_column_and_blocks_follow_one_another() -> None:
    codes = np.zeros((2, 16), np.uint8)
    codes[1, 0] = 0x21
    codes[1, 8] = 0x07
    scales = np.array([[0x38, 0x38], [0x38, 0x40]], np.uint8)
    found = decode_block_scaled(NVFP4, codes, scales)
    assert found.shape == (2, 32)
    assert found[1, :2].tolist() == [0.5, 1.0]
    assert found[1, 16] == 6.0 * 2.0
    assert np.count_nonzero(found) == 3


def test_damaged_scales_give_numbers_and_no_warning() -> None:
    found = decode_block_scaled(NVFP4, np.full((1, 8), 0x77, np.uint8), np.array([[0x7F]], np.uint8))
    assert np.isnan(found).all()
