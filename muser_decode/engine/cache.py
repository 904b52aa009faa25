"""The keys and values of one generation.

Each layer is one array `[2 * kv_heads, room, head_dim]`, keys first, in the compute type: one update
a layer and step, and every head's rows lie together as attention reads them. Updates are lazy; mlx
does them in place because nothing else refers to the array.

A layer with a window keeps rows in token order too, in an array that never grows beyond the window and
`SLACK_TOKENS`: when it is full, what must stay moves to its beginning. Compared with a ring this costs a
move of one window every 112 tokens, and saves a mask, or a copy into order, in every step.
"""

from __future__ import annotations

import mlx.core as mx

from muser_decode.engine.layered import ROLLBACK_TOKENS, SLACK_TOKENS, LayeredCache, capacity_of
from muser_decode.errors import CacheError
from muser_decode.numerics import KV_DTYPES
from muser_wire.geometry import ElementType
from muser_wire.model.spec import ModelSpec


def cache_nbytes(spec: ModelSpec, dtype: mx.Dtype, positions: int) -> int:
    """Return the memory, in bytes, of a cache of so many positions: sliding layers have no more than they keep."""
    row_nbytes = 2 * spec.kv_heads * spec.head_dim * dtype.size
    capacity = capacity_of(positions, spec.max_positions)
    return sum(row_nbytes * min(capacity, most_rows(layer.window, spec.max_positions)) for layer in spec.layers)


def most_rows(window: int | None, most: int) -> int:
    """Return how many rows a layer ever keeps of a sequence of `most` positions."""
    return most if window is None else min(most, window + SLACK_TOKENS)


class LayerRows:
    """One layer's rows, for positions [first, stop).

    Of a sliding layer the older ones are forgotten; whoever asks for them made a mistake.
    """

    def __init__(self, array: mx.array, window: int | None, most: int) -> None:
        self.array = array
        self.first = self.stop = 0
        self._window = window
        self._room = most_rows(window, most)

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` positions, or as many as this layer ever keeps."""
        room = min(capacity, self._room)
        rows, kept, dim = self.array.shape
        if room > kept:
            grown = mx.zeros((rows, room, dim), self.array.dtype)
            if self.stop:
                grown[:, : self.stop - self.first] = self.array[:, : self.stop - self.first]
            self.array = grown

    def needed_from(self, position: int) -> int:
        """Return the first position that a query at `position` sees."""
        return 0 if self._window is None else max(0, position - self._window + 1)

    def append(self, start: int, rows: mx.array) -> mx.array:
        """Write rows at positions from `start`; return the rows that queries there see, the last one's last."""
        seen, stop = self.needed_from(start), start + rows.shape[1]
        if stop - self._kept_from(start) <= self._room:
            into, _ = self.place(start, stop)
            self.array[:, into] = rows
            return self.view(seen, stop)
        # So many rows push out what their first ones see, so attention gets them side by side.
        joined = mx.concatenate([self.view(seen, start), rows], axis=1)
        into, dropped = self.place(start, stop)
        self.array[:, into] = rows[:, dropped:]
        return joined

    def _kept_from(self, position: int) -> int:
        """Return the first position that must stay while those from `position` on are written."""
        if self._window is None:
            return 0
        return max(self.first, position - self._window - ROLLBACK_TOKENS)

    def place(self, start: int, stop: int) -> tuple[slice, int]:
        """Make room for positions [start, stop), which come next or, in a sliding layer, after a gap.

        Returns where in the array they belong, without the first few that are forgotten at once, and how
        many those are.
        """
        if self._window is not None and start > self.stop:
            self.first = start
        if stop - self.first > self.array.shape[1]:
            fits = stop - self._kept_from(start) <= self._room
            self._forget(self._kept_from(start if fits else stop), start)
        self.stop = stop
        dropped = max(0, self.first - start)
        return slice(start + dropped - self.first, stop - self.first), dropped

    def _forget(self, below: int, stop: int) -> None:
        """Move the rows of [below, stop) to the array's beginning."""
        if below < stop:
            self.array[:, : stop - below] = self.array[:, below - self.first : stop - self.first]
        self.first = below

    def view(self, start: int, stop: int) -> mx.array:
        """Return the rows of [start, stop).

        Raises:
            CacheError: some of them are not here, or not any more.
        """
        if start < stop and not self.first <= start < stop <= self.stop:
            raise CacheError(f"positions {start} to {stop} asked of a layer that has {self.first} to {self.stop}")
        return self.array[:, start - self.first : stop - self.first]


class KVCache(LayeredCache[LayerRows]):
    """Keys and values of positions [0, length). Only the engine's thread touches it.

    `element` is the type to which the values are rounded, `dtype` the one that holds them.
    """

    def __init__(self, spec: ModelSpec, dtype: mx.Dtype, element: ElementType) -> None:
        self._kv_heads, self._head_dim = spec.kv_heads, spec.head_dim
        self._dtype, self._element = dtype, element
        nothing = mx.zeros((2 * spec.kv_heads, 0, spec.head_dim), dtype)
        layers = [LayerRows(nothing, layer.window, spec.max_positions) for layer in spec.layers]
        super().__init__(layers, spec.max_positions)

    @property
    def arrays(self) -> list[mx.array]:
        """What to evaluate so that everything written is in memory."""
        return [layer.array for layer in self._layers]

    def append(self, layer: int, rows: mx.array) -> tuple[mx.array, mx.array]:
        """Write one layer's rows `[2 * kv_heads, tokens, head_dim]`, already rounded, after the last position.

        Returns the keys and values that queries there see, each `[kv_heads, keys, head_dim]`: from the first
        that the first query sees to the last query's own. `length` stays until `commit`: the other layers
        need it.
        """
        self.reserve(self._length + rows.shape[1])
        seen = self._layers[layer].append(self._length, rows)
        return seen[: self._kv_heads], seen[self._kv_heads :]

    def install(self, layer: int, start: int, k: mx.array, v: mx.array) -> None:
        """Write planes `[tokens, kv_heads, head_dim]` of the KV element type at positions from `start`.

        Those of a sliding layer may leave a gap that no later query sees. The planes are read when the
        cache is evaluated, so their memory must hold still until then.

        Raises:
            CacheError: another type or shape than this cache has.
        """
        expected = (k.shape[0], self._kv_heads, self._head_dim)
        if k.shape != expected or v.shape != expected or not k.dtype == v.dtype == KV_DTYPES[self._element]:
            raise CacheError(f"planes {k.shape} and {v.shape}, {k.dtype}: expected {expected} in {self._element.value}")
        rows = self._layers[layer]
        into, dropped = self.place(layer, start, start + k.shape[0])
        rows.array[: self._kv_heads, into] = k[dropped:].transpose(1, 0, 2).astype(self._dtype)
        rows.array[self._kv_heads :, into] = v[dropped:].transpose(1, 0, 2).astype(self._dtype)

    def place(self, layer: int, start: int, stop: int) -> tuple[slice, int]:
        """Make room in one layer for positions [start, stop); return where its array, one of `arrays`, takes them.

        The second value is how many first ones of them are forgotten at once.
        """
        self.reserve(stop)
        return self._layers[layer].place(start, stop)

    def planes(self, layer: int, start: int, stop: int) -> tuple[mx.array, mx.array]:
        """Return keys and values of [start, stop) as they travel: `[tokens, kv_heads, head_dim]`, KV element type.

        Raises:
            CacheError: they are not there, or not any more.
        """
        self.check_range(start, stop)
        rows = self._layers[layer].view(start, stop).transpose(1, 0, 2).astype(KV_DTYPES[self._element])
        return rows[:, : self._kv_heads], rows[:, self._kv_heads :]
