"""Projections in three layouts. Each multiplies `[tokens, in]` to `[tokens, out]` and returns single rows.

Which layout is fast depends on the device:

- `Rows`: `[out, in]` as stored. GPUs read it at full bandwidth.
- `Tiles`: `[out / 64, in, 64]`. On x86 OpenBLAS multiplies one token with a whole `[out, in]` by packing
  the matrix first, a copy each token; a tile of 64 columns takes its direct kernel instead and reads at
  memory speed: 2 to 4 times as fast for one token, as fast as before for many. The reference BLAS gains
  a factor of 2 for any number.
- `Packed`: quantised integers with a scale and an offset for each 32 of them; least memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
import numpy as np

from muser_decode.errors import ModelNotSupported
from muser_decode.numerics import name_of, on_gpu
from muser_wire.model.checkpoint import Weight
from muser_wire.model.encodings import AffineWeight

TILE = 64
"""Output columns of a tile. 32 is as fast, 96 and more lose (measured with OpenBLAS 0.3.21, AVX-512)."""


class Linear(Protocol):
    """A matrix `[out, in]` without bias."""

    def __call__(self, x: mx.array) -> mx.array:
        """Return `x @ W.T`: `[tokens, in]` to `[tokens, out]`."""

    def added(self, residual: mx.array, x: mx.array) -> mx.array:
        """Return `residual + x @ W.T`, in one operation where the layout has one."""
        return residual + self(x)

    def rows(self, ids: mx.array) -> mx.array:
        """Return rows `ids` of the matrix, `[len(ids), in]`: the embedding of tokens."""


class Rows(Linear):
    """A dense matrix as stored."""

    def __init__(self, weight: mx.array) -> None:
        self._weight = weight
        self._transposed = weight.T
        mx.eval(self._transposed)

    def __call__(self, x: mx.array) -> mx.array:
        """Return `x @ W.T`."""
        return x @ self._transposed

    def added(self, residual: mx.array, x: mx.array) -> mx.array:
        """Return `residual + x @ W.T` by one kernel."""
        return mx.addmm(residual, x, self._transposed)

    def rows(self, ids: mx.array) -> mx.array:
        """Return rows `ids`."""
        return self._weight[ids]


class Tiles(Linear):
    """A dense matrix cut into tiles of 64 outputs; the last one is padded with zeros."""

    def __init__(self, weight: mx.array) -> None:
        self._out, columns = weight.shape
        padded = mx.pad(weight, [(0, -self._out % TILE), (0, 0)])
        self._tiles = mx.contiguous(padded.reshape(-1, TILE, columns).transpose(0, 2, 1))
        mx.eval(self._tiles)

    def __call__(self, x: mx.array) -> mx.array:
        """Return `x @ W.T`."""
        y = (x[None] @ self._tiles).transpose(1, 0, 2).reshape(x.shape[0], -1)
        return y if y.shape[1] == self._out else y[:, : self._out]

    def rows(self, ids: mx.array) -> mx.array:
        """Return rows `ids`."""
        return self._tiles[ids // TILE, :, ids % TILE]


class Packed(Linear):
    """A quantised matrix, kept packed: w = q * scale + offset, in groups of 32 along the input."""

    def __init__(self, weights: Sequence[AffineWeight], dtype: mx.Dtype) -> None:
        self._bits, self._group = weights[0].bits, weights[0].group_size
        self._q = mx.array(np.concatenate([pack(weight.q, weight.bits) for weight in weights]))
        self._scales = mx.array(np.concatenate([weight.scales for weight in weights])).astype(dtype)
        self._offsets = mx.array(np.concatenate([weight.offsets for weight in weights])).astype(dtype)
        mx.eval(self._q, self._scales, self._offsets)

    def __call__(self, x: mx.array) -> mx.array:
        """Return `x @ W.T`."""
        return mx.quantized_matmul(
            x, self._q, self._scales, self._offsets, transpose=True, group_size=self._group, bits=self._bits
        )

    def rows(self, ids: mx.array) -> mx.array:
        """Return rows `ids`."""
        return mx.dequantize(
            self._q[ids], self._scales[ids], self._offsets[ids], group_size=self._group, bits=self._bits
        )


class Joined(Linear):
    """Projections of one input whose packings differ, one below the other."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self._parts = tuple(parts)

    def __call__(self, x: mx.array) -> mx.array:
        """Return `x @ W.T`."""
        return mx.concatenate([part(x) for part in self._parts], axis=-1)

    def rows(self, ids: mx.array) -> mx.array:
        """Refuse: rows are read from an embedding, which is one matrix."""
        raise ModelNotSupported("an embedding is one matrix; this one is joined from several")


def pack(q: np.ndarray, bits: int) -> np.ndarray:
    """Return integers `[rows, cols]` below 2**bits as mlx packs them: uint32 `[rows, cols * bits / 32]`.

    A row is one little-endian stream of bits, first value lowest. Eight values fill `bits` bytes.

    Example:
        >>> [hex(word) for word in pack(np.arange(8, dtype=np.uint8)[None], bits=4)[0]]
        ['0x76543210']
    """
    eights = q.reshape(q.shape[0], -1, 8).astype("<u8")
    shifts = (np.arange(8, dtype="<u8") * bits).astype("<u8")
    joined = np.bitwise_or.reduce(eights << shifts, axis=-1)
    stream = joined[..., None].view(np.uint8)[..., :bits]
    return np.ascontiguousarray(stream).reshape(q.shape[0], -1).view("<u4")


def dense(weights: Sequence[Weight], dtype: mx.Dtype) -> Linear:
    """Return the weights, one below the other, as a dense matrix in this device's layout."""
    joined = mx.array(np.concatenate([weight.f32() for weight in weights])).astype(dtype)
    return Rows(joined) if on_gpu() else Tiles(joined)


def packed(weights: Sequence[Weight], dtype: mx.Dtype) -> Linear:
    """Return the weights, one below the other, each packed where its encoding allows and dense where not.

    Raises:
        ModelNotSupported: the compute type would round the scales, so the weights would change.
    """
    affine = [weight.affine() for weight in weights]
    if all(part is None for part in affine):
        return dense(weights, dtype)
    if dtype == mx.bfloat16:
        raise ModelNotSupported(f"packed weights need float32 or float16: {name_of(dtype)} rounds their scales")
    whole = [part for part in affine if part is not None]
    if len(whole) == len(weights) and len({(part.bits, part.group_size) for part in whole}) == 1:
        return Packed(whole, dtype)
    return Joined(
        [
            dense([weight], dtype) if part is None else Packed([part], dtype)
            for weight, part in zip(weights, affine, strict=True)
        ]
    )
