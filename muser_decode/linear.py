"""Projections in four layouts. Each multiplies `[tokens, in]` to `[tokens, out]` and returns single rows.

Which layout is fast depends on the device:

- `Rows`: `[out, in]` as stored. GPUs read it at full bandwidth.
- `Tiles`: `[out / 64, in, 64]`. On x86 OpenBLAS multiplies one token with a whole `[out, in]` by packing
  the matrix first, a copy each token; a tile of 64 columns takes its direct kernel instead and reads at
  memory speed: 2 to 4 times as fast for one token, as fast as before for many. The reference BLAS gains
  a factor of 2 for any number.
- `Packed`: quantised integers with a scale and an offset for each group of them; least memory.
- `BlockScaled`: small floating-point codes with a scale for each block, and one for the whole tensor.

Dense layouts are filled block by block of rows, so that loading needs little more memory than the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, cast

import mlx.core as mx
import numpy as np

from muser_decode.alike import FEW_ROWS, alike
from muser_decode.errors import ModelNotSupported
from muser_decode.numerics import name_of, on_gpu
from muser_wire.model.blockscaled import BlockScaledWeight
from muser_wire.model.checkpoint import Weight
from muser_wire.model.encodings import AffineWeight

TILE = 64
"""Output columns of a tile. 32 is as fast, 96 and more lose (measured with OpenBLAS 0.3.21, AVX-512)."""

BLOCK_NBYTES = 16 << 20
"""How much of a matrix is float32 at a time while it is loaded or packed."""

Form = AffineWeight | BlockScaledWeight | None
"""How a weight can be kept packed; None: it cannot."""


class Linear(Protocol):
    """A matrix `[out, in]` without bias.

    `apart` says that the rows are of different requests: in float32 on a CPU each is then what it would be alone.
    """

    def __call__(self, x: mx.array, *, apart: bool = False) -> mx.array:
        """Return `x @ W.T`: `[tokens, in]` to `[tokens, out]`."""

    def added(self, residual: mx.array, x: mx.array, *, apart: bool = False) -> mx.array:
        """Return `residual + x @ W.T`, in one operation where the layout has one."""
        return residual + self(x, apart=apart)

    def rows(self, ids: mx.array) -> mx.array:
        """Return rows `ids` of the matrix, `[len(ids), in]`: the embedding of tokens."""


class Rows(Linear):
    """A dense matrix `[out, in]` as stored."""

    def __init__(self, weight: mx.array) -> None:
        self._weight = weight
        self._transposed = weight.T
        mx.eval(self._transposed)

    def __call__(self, x: mx.array, *, apart: bool = False) -> mx.array:
        """Return `x @ W.T`."""
        return x @ self._transposed

    def added(self, residual: mx.array, x: mx.array, *, apart: bool = False) -> mx.array:
        """Return `residual + x @ W.T` by one kernel."""
        return mx.addmm(residual, x, self._transposed)

    def rows(self, ids: mx.array) -> mx.array:
        """Return rows `ids`."""
        return self._weight[ids]


class Tiles(Linear):
    """A dense matrix `[out, in]` cut into tiles `[out / 64, in, 64]`; the last one is padded with zeros.

    Up to FEW_ROWS rows that are `apart` are each what they would be alone, bit for bit. Of more rows, as units of a
    prompt have, each depends at most on its place among FEW_ROWS; see `muser_decode.alike`.
    """

    def __init__(self, tiles: mx.array, out: int) -> None:
        self._tiles, self._out = tiles, out
        self._alike = alike(tiles.shape[1], TILE, tiles.dtype)

    def __call__(self, x: mx.array, *, apart: bool = False) -> mx.array:
        """Return `x @ W.T`."""
        rows = x.shape[0]
        if apart and self._alike.few < rows <= FEW_ROWS:
            groups = -(-rows // self._alike.few)
            y = self._in_groups(x, groups, -(-rows // groups))
        elif rows > FEW_ROWS and not self._alike.many:
            y = self._in_groups(x, -(-rows // FEW_ROWS), FEW_ROWS)
        else:
            y = (x[None] @ self._tiles).transpose(1, 0, 2).reshape(rows, -1)
        return y if y.shape[1] == self._out else y[:, : self._out]

    def _in_groups(self, x: mx.array, groups: int, each: int) -> mx.array:
        """Return the products of `each` rows at a time, the last ones with zeros after them."""
        rows = x.shape[0]
        padded = mx.pad(x, [(0, groups * each - rows), (0, 0)]).reshape(1, groups, each, -1)
        y = (padded @ self._tiles[:, None]).transpose(1, 2, 0, 3)
        return y.reshape(groups * each, -1)[:rows]

    def rows(self, ids: mx.array) -> mx.array:
        """Return rows `ids`."""
        return self._tiles[ids // TILE, :, ids % TILE]


class Packed(Linear):
    """A quantised matrix, kept packed: w = q * scale + offset, in groups along the input.

    Raises:
        ModelNotSupported: the compute type would round the scales, so the weights would change.
    """

    def __init__(self, weights: Sequence[AffineWeight], dtype: mx.Dtype) -> None:
        self._bits, self._group = weights[0].bits, weights[0].group_size
        self._q = mx.array(np.concatenate([pack(weight.q, weight.bits) for weight in weights]))
        self._scales = _exactly([weight.scales for weight in weights], dtype)
        self._offsets = _exactly([weight.offsets for weight in weights], dtype)
        mx.eval(self._q, self._scales, self._offsets)

    def __call__(self, x: mx.array, *, apart: bool = False) -> mx.array:
        """Return `x @ W.T`."""
        return mx.quantized_matmul(
            x, self._q, self._scales, self._offsets, transpose=True, group_size=self._group, bits=self._bits
        )

    def rows(self, ids: mx.array) -> mx.array:
        """Return rows `ids`."""
        return mx.dequantize(
            self._q[ids], self._scales[ids], self._offsets[ids], group_size=self._group, bits=self._bits
        )


def _exactly(parts: Sequence[np.ndarray], dtype: mx.Dtype) -> mx.array:
    values = mx.array(np.concatenate(parts))
    narrow = values.astype(dtype)
    if not mx.array_equal(narrow.astype(mx.float32), values, equal_nan=True):
        raise ModelNotSupported(f"packed weights need another compute type: {name_of(dtype)} rounds their scales")
    return narrow


class BlockScaled(Linear):
    """Small floating-point codes with a scale for each block: w = code * scale * factor of the tensor.

    The factor multiplies products, in float32: folded into the narrow scales of the blocks it would change
    the weights. Before that products may be large.

    Raises:
        ModelNotSupported: the compute type is float16 and there are factors, without which products overflow it.
    """

    def __init__(self, weights: Sequence[BlockScaledWeight], dtype: mx.Dtype) -> None:
        self._mode, self._dtype = weights[0].mode, dtype
        self._codes = mx.array(np.concatenate([weight.packed for weight in weights]))
        self._scales = mx.array(np.concatenate([weight.scales for weight in weights]))
        factors = [np.full(len(weight.packed), weight.tensor_scale, np.float32) for weight in weights]
        self._factors = mx.array(np.concatenate(factors))
        self._scaled = any(weight.tensor_scale != 1.0 for weight in weights)
        if self._scaled and dtype == mx.float16:
            raise ModelNotSupported(f"{self._mode.encoding} with a factor of the tensor overflows float16")
        self._multiplied = mx.compile(_multiplied, shapeless=True) if on_gpu() else _multiplied
        mx.eval(self._codes, self._scales, self._factors)

    def __call__(self, x: mx.array, *, apart: bool = False) -> mx.array:
        """Return `x @ W.T`."""
        y = mx.quantized_matmul(
            x,
            self._codes,
            self._scales,
            transpose=True,
            group_size=self._mode.group_size,
            bits=self._mode.bits,
            mode=self._mode.name,
        )
        return self._multiplied(y, self._factors) if self._scaled else y

    def rows(self, ids: mx.array) -> mx.array:
        """Return rows `ids`."""
        codes, scales = self._codes[ids], self._scales[ids]
        group, bits = self._mode.group_size, self._mode.bits
        y = mx.dequantize(codes, scales, group_size=group, bits=bits, mode=self._mode.name, dtype=self._dtype)
        return self._multiplied(y, self._factors[ids][:, None]) if self._scaled else y


def _multiplied(y: mx.array, factors: mx.array) -> mx.array:
    return (y * factors).astype(y.dtype)


class Joined(Linear):
    """Projections of one input whose packings differ, one below the other."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self._parts = tuple(parts)

    def __call__(self, x: mx.array, *, apart: bool = False) -> mx.array:
        """Return `x @ W.T`."""
        return mx.concatenate([part(x, apart=apart) for part in self._parts], axis=-1)

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
    rows, columns = q.shape
    packed = np.empty((rows, columns * bits // 32), "<u4")
    for start, stop in _row_blocks(rows, columns):
        eights = q[start:stop].reshape(stop - start, -1, 8).astype("<u8")
        shifts = (np.arange(8, dtype="<u8") * bits).astype("<u8")
        joined = np.bitwise_or.reduce(eights << shifts, axis=-1)
        stream = np.ascontiguousarray(joined[..., None].view(np.uint8)[..., :bits])
        packed[start:stop] = stream.reshape(stop - start, -1).view("<u4")
    return packed


def _row_blocks(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows of about BLOCK_NBYTES in float32, but for the last a multiple of a tile each."""
    step = max(TILE, BLOCK_NBYTES // (4 * columns) // TILE * TILE)
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def _values(weights: Sequence[Weight], start: int, stop: int) -> np.ndarray:
    """Return rows [start, stop), in float32, of matrices that lie one below the other."""
    parts, top = [], 0
    for weight in weights:
        rows = weight.shape[0]
        first, last = max(start - top, 0), min(stop - top, rows)
        if first < last:
            parts.append(weight.f32(first, last))
        top += rows
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def dense(weights: Sequence[Weight], dtype: mx.Dtype) -> Linear:
    """Return the weights, one below the other, as a dense matrix in this device's layout."""
    rows, columns = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
    return _filled_rows(weights, rows, columns, dtype) if on_gpu() else _filled_tiles(weights, rows, columns, dtype)


def _filled_rows(weights: Sequence[Weight], rows: int, columns: int, dtype: mx.Dtype) -> Rows:
    matrix = mx.zeros((rows, columns), dtype)
    for start, stop in _row_blocks(rows, columns):
        matrix[start:stop] = mx.array(_values(weights, start, stop)).astype(dtype)
        mx.eval(matrix)
    return Rows(matrix)


def _filled_tiles(weights: Sequence[Weight], rows: int, columns: int, dtype: mx.Dtype) -> Tiles:
    tiles = mx.zeros((-(-rows // TILE), columns, TILE), dtype)
    for start, stop in _row_blocks(rows, columns):
        block = mx.pad(mx.array(_values(weights, start, stop)), [(0, (start - stop) % TILE), (0, 0)])
        cut = block.reshape(-1, TILE, columns).transpose(0, 2, 1)
        # A block that is the whole matrix takes its place as it is: a view, which would be read against its grain.
        tiles[start // TILE : -(-stop // TILE)] = mx.contiguous(cut.astype(dtype))
        mx.eval(tiles)
    return Tiles(tiles, rows)


def packed(weights: Sequence[Weight], dtype: mx.Dtype) -> Linear:
    """Return the weights, one below the other, each packed where its encoding allows and dense where not.

    Raises:
        ModelNotSupported: the compute type does not go with the encoding.
    """
    forms = [weight.affine() or weight.block_scaled() for weight in weights]
    if len({_layout(form) for form in forms}) == 1:
        return _built(weights, forms, dtype)
    return Joined([_built([weight], [form], dtype) for weight, form in zip(weights, forms, strict=True)])


def _layout(form: Form) -> object:
    """Return what forms must have in common to become one matrix."""
    if isinstance(form, AffineWeight):
        return form.bits, form.group_size
    return None if form is None else form.mode


def _built(weights: Sequence[Weight], forms: Sequence[Form], dtype: mx.Dtype) -> Linear:
    if isinstance(forms[0], AffineWeight):
        return Packed(cast("Sequence[AffineWeight]", forms), dtype)
    if isinstance(forms[0], BlockScaledWeight):
        return BlockScaled(cast("Sequence[BlockScaledWeight]", forms), dtype)
    return dense(weights, dtype)
