"""The keys and values of one generation for the compiled kernels: float16 planes, and integers, in numpy arrays.

The planes are what travels and what is kept of a prompt; attention reads the integers, which are derived once, when
rows are written. Everything is in memory once a call returns.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np

from muser_decode.engine.layered import ROLLBACK_TOKENS, LayeredCache, capacity_of
from muser_decode.errors import CacheError
from muser_decode.reference.cache import check_planes, most_rows
from muser_decode.reference.planes import PlaneShape
from muser_wire.model.spec import ModelSpec
from muser_wire.reference.compiled.operations import Halves, Integers, Operations, Planes
from muser_wire.reference.constants import KEY_BLOCK


class Seen(NamedTuple):
    """What queries see, and the position that it begins with."""

    rows: Planes | Integers
    first: int


class LayerPlanes:
    """One layer's rows for positions [first, stop). Index 0 of the arrays is position `origin`, a multiple of 64."""

    def __init__(self, shape: PlaneShape, window: int | None, most: int, operations: Operations) -> None:
        self._shape, self._operations = shape, operations
        self._window, self._most = window, most_rows(window, most)
        self.origin = self.first = self.stop = 0
        self._rows: Halves = np.zeros((2, 0, shape.kv_heads, shape.head_dim), np.float16)
        self._integers = Integers.zeros(shape.kv_heads, shape.head_dim, 0)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self._rows.nbytes + sum(array.nbytes for array in self._integers.arrays())

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` positions, or as many as this layer ever keeps."""
        room = min(-(-capacity // KEY_BLOCK) * KEY_BLOCK, self._most)
        if room > self._room:
            rows = np.zeros((2, room, *self._rows.shape[2:]), np.float16)
            integers = Integers.zeros(self._shape.kv_heads, self._shape.head_dim, room // KEY_BLOCK)
            rows[:, : self._room] = self._rows
            for new, old in zip(integers.arrays(), self._integers.arrays(), strict=True):
                new[:, : old.shape[1]] = old
            self._rows, self._integers = rows, integers

    @property
    def _room(self) -> int:
        return self._rows.shape[1]

    def needed_from(self, position: int) -> int:
        """Return the first position that a query at `position` sees."""
        return 0 if self._window is None else max(0, position - self._window + 1)

    def append(self, start: int, rows: Planes) -> Seen:
        """Write rows at positions from `start`; return what queries there see."""
        if start + len(rows.keys) - _floor(self._kept_from(start)) <= self._room:
            self.write(start, rows)
            return Seen(self._integers, self.origin)
        # So many rows push out what their first ones see, so attention gets them side by side.
        needed = self.needed_from(start)
        before = self._part(needed, start)
        keys, values = (np.concatenate(pair) for pair in ((before.keys, rows.keys), (before.values, rows.values)))
        self.write(start, rows)
        return Seen(Planes(keys, values), needed)

    def write(self, start: int, rows: Planes) -> None:
        """Write rows at positions from `start`, which come next or, in a sliding layer, after a gap."""
        stop = start + len(rows.keys)
        self._make_room(start, stop)
        dropped = max(0, self.first - start)
        kept, at = Planes(rows.keys[dropped:], rows.values[dropped:]), start + dropped
        into = slice(at - self.origin, stop - self.origin)
        self._rows[0, into], self._rows[1, into] = kept.keys, kept.values
        self._operations.derive(kept, at, self._integers, self.origin)

    def planes(self, start: int, stop: int) -> Planes:
        """Return the rows of [start, stop).

        Raises:
            CacheError: some of them are not here, or not any more.
        """
        if start < stop and not self.first <= start < stop <= self.stop:
            raise CacheError(f"positions {start} to {stop} asked of a layer that has {self.first} to {self.stop}")
        return self._part(start, stop)

    def _part(self, start: int, stop: int) -> Planes:
        keys, values = self._rows[:, start - self.origin : stop - self.origin]
        return Planes(keys, values)

    def _kept_from(self, position: int) -> int:
        """Return the first position that must stay while those from `position` on are written."""
        if self._window is None:
            return 0
        return max(self.first, position - self._window - ROLLBACK_TOKENS)

    def _make_room(self, start: int, stop: int) -> None:
        """Make room for [start, stop)."""
        if self._window is not None and start > self.stop:
            self.first, self.origin = start, _floor(start)
        if stop - self.origin > self._room:
            fits = stop - _floor(self._kept_from(start)) <= self._room
            self._forget(self._kept_from(start if fits else stop), start)
        self.stop = stop

    def _forget(self, below: int, stop: int) -> None:
        """Move the rows of [below, stop), and those of the block that `below` is in, to the arrays' beginning."""
        origin = _floor(below)
        if origin < stop:
            moved = (origin - self.origin) // KEY_BLOCK, -(-(stop - self.origin) // KEY_BLOCK)
            self._rows[:, : stop - origin] = self._rows[:, origin - self.origin : stop - self.origin]
            for array in self._integers.arrays():
                array[:, : moved[1] - moved[0]] = array[:, moved[0] : moved[1]]
        self.first, self.origin = below, origin


class CompiledCache(LayeredCache[LayerPlanes]):
    """Keys and values of positions [0, length). Only the engine's thread touches it."""

    def __init__(self, spec: ModelSpec, operations: Operations) -> None:
        shape = self._shape = PlaneShape(spec.kv_heads, spec.head_dim)
        layers = [LayerPlanes(shape, layer.window, spec.max_positions, operations) for layer in spec.layers]
        super().__init__(layers, spec.max_positions)

    @property
    def arrays(self) -> list[mx.array]:
        """Nothing has to be evaluated."""
        return []

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return sum(layer.nbytes for layer in self._layers)

    def append(self, layer: int, rows: Planes) -> Seen:
        """Write one layer's rows after the last position; return what queries there see.

        `length` stays until `commit`: the other layers need it.
        """
        self.reserve(self._length + len(rows.keys))
        return self._layers[layer].append(self._length, rows)

    def install(self, layer: int, start: int, k: mx.array, v: mx.array) -> None:
        """Write planes `[tokens, kv_heads, head_dim]`, float16, at positions from `start`. They are read here and now.

        Those of a sliding layer may leave a gap that no later query sees.

        Raises:
            CacheError: another type or shape than this cache has.
        """
        check_planes(k, v, self._shape)
        self.reserve(start + k.shape[0])
        self._layers[layer].write(start, Planes(np.array(k, order="C"), np.array(v, order="C")))

    def planes(self, layer: int, start: int, stop: int) -> tuple[mx.array, mx.array]:
        """Return copies of keys and values of [start, stop) as they travel: `[tokens, kv_heads, head_dim]`, float16.

        Raises:
            CacheError: they are not there, or not any more.
        """
        self.check_range(start, stop)
        rows = self._layers[layer].planes(start, stop)
        return mx.array(rows.keys), mx.array(rows.values)


def cache_nbytes(spec: ModelSpec, positions: int) -> int:
    """Return the memory, in bytes, of a cache of so many positions: sliding layers have no more than they keep."""
    capacity = -(-capacity_of(positions, spec.max_positions) // KEY_BLOCK) * KEY_BLOCK
    row_nbytes = 2 * 2 * spec.kv_heads * spec.head_dim
    block = Integers.zeros(spec.kv_heads, spec.head_dim, 1)
    row_nbytes += sum(array.nbytes for array in block.arrays()) // KEY_BLOCK
    return sum(row_nbytes * min(capacity, most_rows(layer.window, spec.max_positions)) for layer in spec.layers)


def _floor(position: int) -> int:
    return position // KEY_BLOCK * KEY_BLOCK
