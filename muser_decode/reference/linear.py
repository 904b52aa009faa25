"""Linear layers of the lane [N4]: integers in tiles, exact products of groups, one sum in order.

Tiles are `[groups, rows / 64, group, 64]`: on a CPU a product with 64 columns takes OpenBLAS's direct kernel, for one
token as for many, and reads at memory speed (the native lane's `Tiles` have the same reason). Products of all groups
come first, each exact; scales and offsets are applied to all; then one sum runs over the groups. So one layout and one
text serve any number of rows, and each row's numbers are those that it has alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from muser_decode.reference.sums import ordered_sum
from muser_decode.reference.vectors import Quantiser
from muser_wire.errors import CheckpointError
from muser_wire.reference.canonical import Weights
from muser_wire.reference.constants import INTEGER_BITS, SMALLEST_EXPONENT, WEIGHT_GROUP
from muser_wire.reference.linear import IntegerWeight

TILE = 64
"""Output columns of a tile."""

LOAD_NBYTES = 16 << 20
"""How much of a matrix is float32 on the host at a time while it is loaded."""

BLOCK_ROWS = 64
"""Activation rows that are multiplied at a time: more gain nothing, and their products leave the CPU's cache."""

PRODUCTS_NBYTES = 1 << 20
"""How large the products of all groups may be at a time: what a step of several operations keeps in a CPU's cache."""


class Activations(NamedTuple):
    """Rows as linear layers take them: integers times powers of two `[groups, 1, rows, group]`, in groups of 32.

    `sums` are those of each group, `[groups, 1, rows, 1]`, exact as well.
    """

    values: mx.array
    sums: mx.array

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return self.values.shape[2]

    def block(self, start: int, stop: int) -> Activations:
        """Return rows [start, stop)."""
        return Activations(self.values[:, :, start:stop], self.sums[:, :, start:stop])

    def halved(self) -> Activations:
        """Return the same in groups of half the size."""
        groups, _, rows, group = self.values.shape
        halves = self.values.reshape(groups, rows, 2, group // 2).transpose(0, 2, 1, 3)
        values = halves.reshape(2 * groups, 1, rows, group // 2)
        return Activations(values, mx.sum(values, axis=-1, keepdims=True))


class ActivationQuantiser:
    """Makes `Activations` of float32 rows."""

    def __init__(self) -> None:
        self._quantiser = Quantiser(INTEGER_BITS, SMALLEST_EXPONENT)

    def __call__(self, x: mx.array) -> Activations:
        """Return `x [rows, columns]` quantised."""
        rows, columns = x.shape
        groups = columns // WEIGHT_GROUP
        if rows == 1:
            grouped = x.reshape(groups, 1, 1, WEIGHT_GROUP)
        else:
            grouped = mx.contiguous(x.reshape(rows, groups, WEIGHT_GROUP).swapaxes(0, 1))[:, None]
        scales = self._quantiser.scales(grouped)
        values = mx.round(grouped * scales.up) * scales.down
        return Activations(values, mx.sum(values, axis=-1, keepdims=True))


class IntegerTiles:
    """Matrices of one kind of groups, one below the other, as integers with scales and, where they have them, offsets.

    `s` and `m` are `[groups, tiles, 1, 64]`. Rows that fill the last tile are zeros.
    """

    def __init__(self, weights: Weights, names: Sequence[str]) -> None:
        first = weights.linear(names[0], 0, 1)
        self.rows = sum(weights.shape(name)[0] for name in names)
        self._group, groups = first.group, first.q.shape[1]
        tiles = -(-self.rows // TILE)
        self._q = mx.zeros((groups, tiles, first.group, TILE))
        self._s = mx.zeros((groups, tiles, 1, TILE))
        self._m = None if first.m is None else mx.zeros((groups, tiles, 1, TILE))
        step = max(TILE, LOAD_NBYTES // (4 * first.columns) // TILE * TILE)
        for start in range(0, self.rows, step):
            self._fill(start, _rows_of(weights, names, start, min(self.rows, start + step)))

    def _fill(self, start: int, part: IntegerWeight) -> None:
        into = slice(start // TILE, -(-(start + part.rows) // TILE))
        self._q[:, into] = mx.array(_tiled(part.q).astype(np.float32))
        self._s[:, into] = mx.array(_tiled(part.s[:, :, None]))
        if self._m is not None and part.m is not None:
            self._m[:, into] = mx.array(_tiled(part.m[:, :, None]))
        mx.eval([array for array in (self._q, self._s, self._m) if array is not None])

    def __call__(self, x: Activations) -> mx.array:
        """Return `[rows of x, rows]`."""
        if self._group < WEIGHT_GROUP:
            x = x.halved()
        if x.rows == 1:
            y = _product(x, self._q, self._s, self._m).reshape(1, -1)
        else:
            y = self._blocks(x).transpose(1, 0, 2).reshape(x.rows, -1)
        return y if y.shape[1] == self.rows else y[:, : self.rows]

    def _blocks(self, x: Activations) -> mx.array:
        """Return `[tiles, rows of x, 64]`, computed in blocks that stay in a CPU's cache."""
        groups, tiles = self._q.shape[:2]
        parts = [x.block(at, min(x.rows, at + BLOCK_ROWS)) for at in range(0, x.rows, BLOCK_ROWS)]
        step = max(1, PRODUCTS_NBYTES // (4 * groups * TILE * parts[0].rows))
        columns = []
        for at in range(0, tiles, step):
            q, s = self._q[:, at : at + step], self._s[:, at : at + step]
            m = None if self._m is None else self._m[:, at : at + step]
            columns.append(_joined([_product(part, q, s, m).squeeze(0) for part in parts], 1))
        return _joined(columns, 0)

    def embedded(self, ids: mx.array) -> mx.array:
        """Return rows `ids` of the matrix, as `TokenRows` does."""
        tile, column = ids // TILE, ids % TILE
        offsets = None if self._m is None else self._m[:, tile, :, column]
        return _values(self._q[:, tile, :, column], self._s[:, tile, :, column], offsets)


def _product(x: Activations, q: mx.array, s: mx.array, m: mx.array | None) -> mx.array:
    """Return `[1, tiles, rows of x, 64]`: t = D * s (+ S * m) of every group, added up with the groups ascending."""
    terms = (x.values @ q) * s
    if m is not None:
        terms = terms + x.sums * m
    return ordered_sum(terms, 0)


class Side:
    """Matrices of one input whose groups differ, their outputs side by side."""

    def __init__(self, parts: Sequence[IntegerTiles]) -> None:
        self._parts = tuple(parts)

    def __call__(self, x: Activations) -> mx.array:
        """Return the outputs, `[rows of x, rows of all]`."""
        return mx.concatenate([part(x) for part in self._parts], axis=1)


Linear = IntegerTiles | Side


class TokenRows:
    """A matrix of which only rows are read: the embedding, where the head is another. A byte for each number."""

    def __init__(self, weights: Weights, name: str) -> None:
        matrix = weights.linear(name)
        self._q, self._s = mx.array(matrix.q), mx.array(matrix.s[:, :, None])
        self._m = None if matrix.m is None else mx.array(matrix.m[:, :, None])

    def embedded(self, ids: mx.array) -> mx.array:
        """Return rows `ids` in float32, `[len(ids), columns]`: q * s rounded, then + m rounded."""
        offsets = None if self._m is None else self._m[ids]
        return _values(self._q[ids].astype(mx.float32), self._s[ids], offsets)


def _values(q: mx.array, s: mx.array, m: mx.array | None) -> mx.array:
    """Return rows of numbers of `[rows, groups, group]` integers."""
    values = q * s
    if m is not None:
        values = values + m
    return values.reshape(values.shape[0], -1)


def linear_of(weights: Weights, *names: str) -> Linear:
    """Return matrices of one input as one layer; those of a kind next to each other become one matrix."""
    kinds: list[list[str]] = []
    for name in names:
        if kinds and _kind(weights, kinds[-1][0]) == _kind(weights, name):
            kinds[-1].append(name)
        else:
            kinds.append([name])
    parts = [IntegerTiles(weights, kind) for kind in kinds]
    return parts[0] if len(parts) == 1 else Side(parts)


def _kind(weights: Weights, name: str) -> tuple[int, int, bool]:
    row = weights.linear(name, 0, 1)
    return row.columns, row.group, row.m is not None


def _rows_of(weights: Weights, names: Sequence[str], start: int, stop: int) -> IntegerWeight:
    """Return rows [start, stop) of matrices that lie one below the other."""
    parts, top = [], 0
    for name in names:
        rows = weights.shape(name)[0]
        first, last = max(start - top, 0), min(stop - top, rows)
        if first < last:
            parts.append(weights.linear(name, first, last))
        top += rows
    if not parts:
        raise CheckpointError(f"{', '.join(names)} have {top} rows, not those from {start} to {stop}")
    offsets = [part.m for part in parts if part.m is not None]
    return IntegerWeight(
        np.concatenate([part.q for part in parts]),
        np.concatenate([part.s for part in parts]),
        np.concatenate(offsets) if offsets else None,
    )


def _tiled(rows: np.ndarray) -> np.ndarray:
    """Return `[rows, groups, n]` as `[groups, rows / 64, n, 64]`, filled up with zero rows."""
    count, groups, width = rows.shape
    padded = np.pad(rows, [(0, -count % TILE), (0, 0), (0, 0)])
    return np.ascontiguousarray(padded.reshape(-1, TILE, groups, width).transpose(2, 0, 3, 1))


def _joined(parts: Sequence[mx.array], axis: int) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(list(parts), axis)
