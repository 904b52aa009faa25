"""Block-scaled floats: small floating-point codes with one shared scale for each block of a row.

| mode | codes | scale of a block | weights in a block |
|---|---|---|---|
| nvfp4 | e2m1, two in a byte, even column in the low nibble | e4m3 | 16 |
| mxfp4 | e2m1, the same | power of two (e8m0) | 32 |
| mxfp8 | e4m3 | power of two (e8m0) | 32 |

NVFP4 as published for GPUs has one float32 factor more for the whole tensor. It stays apart here: MLX's
arrays have no place for it, and folded into the block scales it would cost 3 % of accuracy.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class BlockMode:
    """One of the three layouts of the table above, under MLX's name for it."""

    name: str
    bits: int
    group_size: int

    @property
    def encoding(self) -> str:
        """The name shown to people."""
        return self.name.upper()


NVFP4 = BlockMode("nvfp4", bits=4, group_size=16)
MXFP4 = BlockMode("mxfp4", bits=4, group_size=32)
MXFP8 = BlockMode("mxfp8", bits=8, group_size=32)
MODES = {mode.name: mode for mode in (NVFP4, MXFP4, MXFP8)}


@dataclass(frozen=True, eq=False)
class BlockScaledWeight:
    """A matrix in the form of MLX's `quantized_matmul`: w = code * scale * `tensor_scale`.

    `packed` is uint32 `[rows, cols * bits / 32]` and `scales` uint8 `[rows, cols / group_size]`, both
    bit for bit MLX's arrays of this mode. MLX does not know `tensor_scale`: multiply the product by
    it. That agrees with `Weight.f32()` to one rounding of float32.
    """

    mode: BlockMode
    packed: npt.NDArray[np.uint32]
    scales: npt.NDArray[np.uint8]
    tensor_scale: float

    def reordered(self, rows: npt.NDArray[np.intp]) -> BlockScaledWeight:
        """Return the matrix whose row i is row `rows[i]` of this one."""
        return replace(self, packed=self.packed[rows], scales=self.scales[rows])


@functools.cache
def e2m1_values() -> npt.NDArray[np.float32]:
    """Return the value of each 4-bit code: sign, two bits of exponent, one of mantissa.

    >>> e2m1_values()[:8].tolist()
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    """
    positive = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
    return np.concatenate((positive, -positive))


@functools.cache
def e4m3_values() -> npt.NDArray[np.float32]:
    """Return the value of each byte as a float of 4 exponent bits (bias 7) and 3 mantissa bits; 0x7f is NaN.

    >>> e4m3_values()[[0x00, 0x01, 0x08, 0x38, 0x7e, 0xb8]].tolist()
    [0.0, 0.001953125, 0.015625, 1.0, 448.0, -1.0]
    """
    codes = np.arange(128)
    exponent, mantissa = codes >> 3, codes & 7
    # Exponent 0 has no implicit leading one.
    values = np.ldexp(np.where(exponent == 0, mantissa, mantissa + 8) / 8.0, np.maximum(exponent, 1) - 7)
    values[0x7F] = np.nan
    return np.concatenate((values, -values)).astype(np.float32)


@functools.cache
def e8m0_values() -> npt.NDArray[np.float32]:
    """Return the power of two that each byte stands for: 2 ** (byte - 127); 0xff is NaN.

    >>> e8m0_values()[[126, 127, 130]].tolist()
    [0.5, 1.0, 8.0]
    """
    values = np.ldexp(np.ones(256), np.arange(256) - 127)
    values[0xFF] = np.nan
    return values.astype(np.float32)


def decode_block_scaled(
    mode: BlockMode, codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]
) -> npt.NDArray[np.float32]:
    """Return code * scale as new float32 values `[rows, cols]`: exact, but for products beyond float32's range.

    `codes` is `[rows, bytes]`, `scales` `[rows, blocks]`.
    """
    rows, blocks = scales.shape
    values = _unpacked(codes) if mode.bits == 4 else e4m3_values()[codes]
    factors = e4m3_values() if mode is NVFP4 else e8m0_values()
    grouped = values.reshape(rows, blocks, mode.group_size)
    # NaN scales of a damaged file are numbers to carry on, not a warning to print.
    with np.errstate(all="ignore"):
        grouped *= factors[scales][..., None]
    return grouped.reshape(rows, blocks * mode.group_size)


def _unpacked(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Return the values of packed 4-bit codes, two for each byte: low nibble, then high."""
    return _e2m1_pairs()[codes]


@functools.cache
def _e2m1_pairs() -> npt.NDArray[np.float32]:
    """Return the two values of each byte, `[256, 2]`."""
    both = np.arange(256)
    return e2m1_values()[np.stack((both & 15, both >> 4), axis=1)]
