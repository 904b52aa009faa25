"""Encodings of weights: from stored bytes to float32, and to the packed affine form.

Block formats and their dequantisation come from the `gguf` package; the names are those of GGUF,
which safetensors shares for F32, F16 and BF16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from muser_wire.model.blockscaled import e4m3_values

GROUP_SIZE = 32


@dataclass(frozen=True, eq=False)
class AffineWeight:
    """A packed matrix: w = q * scale + offset, one scale and offset for `group_size` weights along the last axis.

    `q` is uint8 `[rows, cols]` below 2 ** bits; `scales` and `offsets` are float32 `[rows, cols / group_size]`.
    Evaluated in float32 with a multiplication and an addition it gives the values of `Weight.f32()`
    exactly; only a zero may differ in its sign. MLX's own checkpoints have groups of 64 as well.
    """

    bits: int
    q: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float32]
    offsets: npt.NDArray[np.float32]
    group_size: int = GROUP_SIZE

    def reordered(self, rows: npt.NDArray[np.intp]) -> AffineWeight:
        """Return the matrix whose row i is row `rows[i]` of this one."""
        return replace(self, q=self.q[rows], scales=self.scales[rows], offsets=self.offsets[rows])


@functools.cache
def block_size(encoding: str) -> tuple[int, int] | None:
    """Return (weights, bytes) of one block, or None when this encoding cannot be turned into numbers.

    >>> block_size("Q4_1")
    (32, 20)
    """
    if encoding not in GGMLQuantizationType.__members__:
        return None
    kind = GGMLQuantizationType[encoding]
    weights, nbytes = GGML_QUANT_SIZES[kind]
    try:
        # The package has no list of what it can dequantise; one block of zeros tells.
        _dequantize(np.zeros((1, nbytes), np.uint8), kind)
    except NotImplementedError:
        return None
    return int(weights), int(nbytes)


def decode_f32(encoding: str, data: npt.NDArray[np.uint8], shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Return the weights in `data` as a new, writable, C-contiguous float32 array of `shape`.

    `encoding` must be one for which `block_size` is known, or F8_E4M3, and `data` as long as `shape` needs.
    """
    if encoding == "F32":
        return data.view("<f4").astype(np.float32).reshape(shape)
    if encoding == "BF16":
        # A bfloat16 is the upper half of a float32.
        bits = data.view("<u2").astype(np.uint32)
        bits <<= np.uint32(16)
        return bits.view(np.float32).reshape(shape)
    if encoding == "F8_E4M3":
        return e4m3_values()[data].reshape(shape)
    kind = GGMLQuantizationType[encoding]
    weights, nbytes = GGML_QUANT_SIZES[kind]
    rows = data.reshape(-1, shape[-1] // weights * nbytes)
    return _dequantize(rows, kind).reshape(shape)


def _dequantize(rows: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> npt.NDArray[np.float32]:
    # Damaged scales may be infinite or NaN: numbers to carry on, not a warning to print.
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(dequantize(rows, kind), dtype=np.float32)


def decode_affine(encoding: str, data: npt.NDArray[np.uint8], shape: tuple[int, ...]) -> AffineWeight | None:
    """Return a matrix in its packed form, or None when its encoding or its rank has no such form."""
    layout = _AFFINE.get(encoding)
    if layout is None or len(shape) != 2:
        return None
    rows, cols = shape
    _, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[encoding]]
    blocks = data.reshape(-1, nbytes)
    scales = _f16(blocks, 0)
    # Without a stored offset the codes are signed around a centre: d * (q - centre) = q * d + (-centre * d),
    # and both products are exact in float32.
    offsets = _f16(blocks, 2) if layout.stored_offset else scales * np.float32(-layout.centre)
    groups = (rows, cols // GROUP_SIZE)
    q = layout.codes(blocks[:, layout.head_nbytes :]).reshape(shape)
    return AffineWeight(layout.bits, q, scales.reshape(groups), offsets.reshape(groups))


def _f16(blocks: npt.NDArray[np.uint8], at: int) -> npt.NDArray[np.float32]:
    """Return the float16 at byte `at` of every block, as float32."""
    with np.errstate(invalid="ignore"):
        return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(body: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return `[blocks, 32]` codes from 16 bytes a block: low nibbles are weights 0..15, high ones 16..31."""
    return np.concatenate((body & np.uint8(15), body >> np.uint8(4)), axis=1)


def _nibbles_and_fifth_bits(body: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return `[blocks, 32]` codes from 4 bytes of fifth bits, lowest first, and 16 bytes of nibbles."""
    fifth = np.unpackbits(body[:, :4], axis=1, bitorder="little")
    return _nibbles(body[:, 4:]) | (fifth << np.uint8(4))


def _signed_bytes(body: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return signed bytes shifted up by 128: adding 128 modulo 256 flips the top bit."""
    return body ^ np.uint8(0x80)


@dataclass(frozen=True)
class _AffineLayout:
    bits: int
    head_nbytes: int
    stored_offset: bool
    centre: int
    codes: Callable[[npt.NDArray[np.uint8]], npt.NDArray[Any]]


_AFFINE = {
    "Q4_0": _AffineLayout(bits=4, head_nbytes=2, stored_offset=False, centre=8, codes=_nibbles),
    "Q4_1": _AffineLayout(bits=4, head_nbytes=4, stored_offset=True, centre=0, codes=_nibbles),
    "Q5_0": _AffineLayout(bits=5, head_nbytes=2, stored_offset=False, centre=16, codes=_nibbles_and_fifth_bits),
    "Q5_1": _AffineLayout(bits=5, head_nbytes=4, stored_offset=True, centre=0, codes=_nibbles_and_fifth_bits),
    "Q8_0": _AffineLayout(bits=8, head_nbytes=2, stored_offset=False, centre=128, codes=_signed_bytes),
}
