"""Float32 matrices as GGUF blocks: what `muser model quantize` writes.

Q8_0 and Q4_0 come from the `gguf` package; it only reads Q4_K, so that one is made here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, quantize

Floats = npt.NDArray[np.float32]

BLOCKS = {"Q8_0": 32, "Q4_0": 32, "Q4_K": 256}
"""Columns of a block."""
GROUPS, GROUP = 8, 32
LARGEST_CODE, LARGEST_SCALE = 15, 63
STRETCHES = tuple(np.float32(1 - step / 40) for step in range(9))
"""How far a group's range may be narrowed: what is cut off at its ends makes the steps between finer."""


def encode(values: Floats, encoding: str) -> npt.NDArray[np.uint8]:
    """Return a matrix `[rows, columns]` as bytes `[rows, bytes]` in one of Q8_0, Q4_0, Q4_K.

    Columns must be a multiple of the encoding's block.
    """
    if encoding == "Q4_K":
        return _q4_k(values)
    return np.asarray(quantize(values, GGMLQuantizationType[encoding]))


def _q4_k(values: Floats) -> npt.NDArray[np.uint8]:
    """Return superblocks of 256: d, dmin, 8 scales and 8 minima of 6 bits, 256 codes of 4 bits.

    w = (d * scale) * code - dmin * min. Each group's range is fitted by least squares over `STRETCHES`.
    """
    rows = values.shape[0]
    x = values.reshape(-1, GROUPS, GROUP)
    step, low = _fitted(x)
    d, scales = _six_bits(step)
    dmin, minima = _six_bits(low)
    step, low = d[:, None] * scales, dmin[:, None] * minima
    inverse = np.divide(1, step, out=np.zeros_like(step), where=step > 0)
    codes = np.clip(np.rint((x + low[..., None]) * inverse[..., None]), 0, LARGEST_CODE).astype(np.uint8)
    pairs = codes.reshape(-1, GROUPS // 2, 2, GROUP)
    packed = (pairs[:, :, 0] | pairs[:, :, 1] << np.uint8(4)).reshape(len(x), -1)
    heads = np.stack([d, dmin], axis=-1).astype("<f2").view(np.uint8)
    return np.concatenate([heads, _packed_scales(scales, minima), packed], axis=-1).reshape(rows, -1)


def _fitted(x: Floats) -> tuple[Floats, Floats]:
    """Return the step between codes and the value below zero of code 0, negated, for each group."""
    low = np.maximum(0, -x.min(-1))
    span = np.maximum(x.max(-1) + low, np.float32(1e-12))
    best, error = span / LARGEST_CODE, np.full(low.shape, np.inf, np.float32)
    for stretch in STRETCHES:
        step = span * stretch / LARGEST_CODE
        codes = np.clip(np.rint((x + low[..., None]) / step[..., None]), 0, LARGEST_CODE)
        found = np.square(codes * step[..., None] - low[..., None] - x).sum(-1)
        best, error = np.where(found < error, step, best), np.minimum(found, error)
    return best.astype(np.float32), low


def _six_bits(values: Floats) -> tuple[Floats, npt.NDArray[np.uint8]]:
    """Return a float16 factor of each superblock, as float32, and what 0 to 63 times it comes nearest to the values."""
    factor = (values.max(-1) / LARGEST_SCALE).astype(np.float16).astype(np.float32)
    inverse = np.divide(1, factor, out=np.zeros_like(factor), where=factor > 0)
    return factor, np.clip(np.rint(values * inverse[:, None]), 0, LARGEST_SCALE).astype(np.uint8)


def _packed_scales(scales: npt.NDArray[np.uint8], minima: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return 8 scales and 8 minima of 6 bits in 12 bytes; the upper two bits of the last four lie over the first."""
    half, top = GROUPS // 2, np.uint8(6)
    low = scales[:, :half] | scales[:, half:] >> np.uint8(4) << top
    middle = minima[:, :half] | minima[:, half:] >> np.uint8(4) << top
    high = scales[:, half:] & np.uint8(15) | (minima[:, half:] & np.uint8(15)) << np.uint8(4)
    return np.concatenate([low, middle, high], axis=-1)
