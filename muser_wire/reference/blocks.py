"""GGUF blocks as integers, scales and offsets [N10].

Every scale and offset is exact in float32: a product of a float16 and an integer of at most 8 bits.

| encoding | group | q | s | m |
|---|---|---|---|---|
| Q4_0, Q5_0 | 32 | code - 8, code - 16 | d | none |
| Q8_0 | 32 | code | d | none |
| Q4_1, Q5_1 | 32 | code | d | m |
| Q4_K, Q5_K | 32 | code | d * scale | 0 - dmin * min |
| Q6_K | 16 | code - 32 | d * scale | none |
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from muser_wire.reference.linear import IntegerWeight

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
SUPERBLOCK = 256


def _f16(blocks: Bytes, at: int) -> Floats:
    """Return the float16 at byte `at` of every block, in float32."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2").astype(np.float32)[..., 0]


def _nibbles(body: Bytes) -> Bytes:
    """Return the low nibbles of the last axis, then the high ones."""
    return np.concatenate((body & np.uint8(15), body >> np.uint8(4)), axis=-1)


def _fifth_bits(body: Bytes) -> Bytes:
    """Return 32 bits of 4 bytes, lowest first, each as 0 or 16."""
    return np.unpackbits(body, axis=-1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Bytes) -> IntegerWeight:
    return _centred(_nibbles(blocks[..., 2:]), 8, _f16(blocks, 0))


def _q5_0(blocks: Bytes) -> IntegerWeight:
    return _centred(_nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6]), 16, _f16(blocks, 0))


def _centred(codes: Bytes, centre: int, s: Floats) -> IntegerWeight:
    return IntegerWeight(codes.astype(np.int8) - np.int8(centre), s, None)


def _q8_0(blocks: Bytes) -> IntegerWeight:
    return IntegerWeight(np.ascontiguousarray(blocks[..., 2:]).view(np.int8), _f16(blocks, 0), None)


def _q4_1(blocks: Bytes) -> IntegerWeight:
    return IntegerWeight(_nibbles(blocks[..., 4:]).astype(np.int8), _f16(blocks, 0), _f16(blocks, 2))


def _q5_1(blocks: Bytes) -> IntegerWeight:
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return IntegerWeight(codes.astype(np.int8), _f16(blocks, 0), _f16(blocks, 2))


def _q4_k(blocks: Bytes) -> IntegerWeight:
    # 32 bytes hold two groups: low nibbles, then high ones.
    pairs = blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32)
    return _with_6_bit_scales(blocks, _nibbles(pairs))


def _q5_k(blocks: Bytes) -> IntegerWeight:
    pairs = blocks[..., 48:].reshape(*blocks.shape[:-1], 4, 32)
    # Bit g of byte j is the fifth bit of component j of group g.
    bits = np.unpackbits(blocks[..., 16:48, None], axis=-1, bitorder="little").swapaxes(-1, -2)
    fifth = bits.reshape(*blocks.shape[:-1], 4, 64) << np.uint8(4)
    return _with_6_bit_scales(blocks, _nibbles(pairs) | fifth)


def _with_6_bit_scales(blocks: Bytes, codes: Bytes) -> IntegerWeight:
    """Return groups of a superblock with d and dmin in front, and 8 scales and minima of 6 bits in 12 bytes."""
    packed = blocks[..., 4:16]
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    top = np.uint8(6)
    scales = np.concatenate((low & np.uint8(63), (high & np.uint8(15)) | (low >> top) << np.uint8(4)), axis=-1)
    minima = np.concatenate((middle & np.uint8(63), high >> np.uint8(4) | (middle >> top) << np.uint8(4)), axis=-1)
    rows = blocks.shape[0]
    s = _f16(blocks, 0)[..., None] * scales.astype(np.float32)
    # Subtracted from +0, so that no offset is a negative zero.
    m = np.float32(0) - _f16(blocks, 2)[..., None] * minima.astype(np.float32)
    q = codes.astype(np.int8).reshape(rows, -1, 32)
    return IntegerWeight(q, s.reshape(rows, -1), m.reshape(rows, -1))


def _q6_k(blocks: Bytes) -> IntegerWeight:
    rows, count = blocks.shape[:2]
    # Each half of 128 weights: 64 bytes of low nibbles and 32 bytes of two upper bits.
    low = blocks[..., :128].reshape(rows, count, 2, 64)
    upper = blocks[..., 128:192].reshape(rows, count, 2, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = ((upper[..., None, :] >> shifts) & np.uint8(3)) << np.uint8(4)
    codes = _nibbles(low).reshape(rows, count, 2, 4, 32) | high
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.float32)
    s = _f16(blocks, 208)[..., None] * scales
    q = codes.astype(np.int8).reshape(rows, -1, 16) - np.int8(32)
    return IntegerWeight(q, s.reshape(rows, -1), None)


DECODERS: dict[str, tuple[int, int, Callable[[Bytes], IntegerWeight]]] = {
    "Q4_0": (32, 18, _q4_0),
    "Q4_1": (32, 20, _q4_1),
    "Q5_0": (32, 22, _q5_0),
    "Q5_1": (32, 24, _q5_1),
    "Q8_0": (32, 34, _q8_0),
    "Q4_K": (SUPERBLOCK, 144, _q4_k),
    "Q5_K": (SUPERBLOCK, 176, _q5_k),
    "Q6_K": (SUPERBLOCK, 210, _q6_k),
}
"""By encoding: weights and bytes of a block, and the function from `[rows, blocks, bytes]` to the canonical form."""
