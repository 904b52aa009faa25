"""The keys and values of one generation of the reference lane: float16 planes, and the integers derived from them.

The planes are what travels and what is kept of a prompt; attention reads the integers, a pure function of them that is
computed once, when rows are written. Rows lie in token order from a position that is a multiple of a key block, so that
blocks anchored at position 0 are slices. Rows that nobody wrote, or that were taken back, may lie around those of
[first, stop): attention hides them.
"""

from __future__ import annotations

import mlx.core as mx

from muser_decode.engine.layered import ROLLBACK_TOKENS, SLACK_TOKENS, LayeredCache, capacity_of
from muser_decode.errors import CacheError
from muser_decode.reference.planes import Derivation, PlaneShape, Rows, Seen
from muser_wire.model.spec import ModelSpec
from muser_wire.reference.constants import KEY_BLOCK


class LayerCache:
    """One layer's rows for positions [first, stop). Index 0 of the arrays is position `origin`."""

    def __init__(self, shape: PlaneShape, window: int | None, most: int) -> None:
        self._shape, self._window = shape, window
        self._most = most_rows(window, most)
        self.origin = self.first = self.stop = 0
        self._arrays = shape.empty(0)

    @property
    def arrays(self) -> list[mx.array]:
        """What to evaluate so that everything written is in memory."""
        return self._arrays

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` positions, or as many as this layer ever keeps."""
        room = min(-(-capacity // KEY_BLOCK) * KEY_BLOCK, self._most)
        if room > self._room:
            kept = self.stop - self.origin
            grown = self._shape.empty(room)
            for new, old in zip(grown, self._arrays, strict=True):
                if kept:
                    new[..., :kept, :] = old[..., :kept, :]
            self._arrays = grown

    @property
    def _room(self) -> int:
        return int(self._arrays[0].shape[-2])

    def needed_from(self, position: int) -> int:
        """Return the first position that a query at `position` sees."""
        return 0 if self._window is None else max(0, position - self._window + 1)

    def append(self, start: int, rows: Rows) -> Seen:
        """Write rows at positions from `start`.

        Returns what queries there see: whole key blocks, from that of the first key that the first query sees to that
        of the last row.
        """
        stop = start + rows.tokens
        base = _floor(self.needed_from(start))
        if stop - _floor(self._kept_from(start)) <= self._room:
            self.write(start, rows)
            last = -(-stop // KEY_BLOCK) * KEY_BLOCK
            return self._seen.part(base - self.origin, last - self.origin)
        # So many rows push out what their first ones see, so attention gets them side by side.
        before = self._seen.part(base - self.origin, start - self.origin)
        filling = self._shape.empty(-(stop - base) % KEY_BLOCK)[1:]
        joined = zip(before, rows.seen, filling, strict=True)
        seen = Seen(*(mx.concatenate(list(parts), axis=-2) for parts in joined))
        self.write(start, rows)
        return seen

    def write(self, start: int, rows: Rows) -> None:
        """Write rows at positions from `start`, which come next or, in a sliding layer, after a gap."""
        into, dropped = self._place(start, start + rows.tokens)
        for array, new in zip(self._arrays, rows.arrays(), strict=True):
            array[..., into, :] = new[..., dropped:, :] if dropped else new

    def planes(self, start: int, stop: int) -> mx.array:
        """Return the planes of [start, stop).

        Raises:
            CacheError: some of them are not here, or not any more.
        """
        if start < stop and not self.first <= start < stop <= self.stop:
            raise CacheError(f"positions {start} to {stop} asked of a layer that has {self.first} to {self.stop}")
        return self._arrays[0][:, start - self.origin : stop - self.origin]

    @property
    def _seen(self) -> Seen:
        return Seen(*self._arrays[1:])

    def _kept_from(self, position: int) -> int:
        """Return the first position that must stay while those from `position` on are written."""
        if self._window is None:
            return 0
        return max(self.first, position - self._window - ROLLBACK_TOKENS)

    def _place(self, start: int, stop: int) -> tuple[slice, int]:
        """Make room for [start, stop); return where in the arrays it goes, and how many rows are forgotten at once."""
        if self._window is not None and start > self.stop:
            self.first, self.origin = start, _floor(start)
        if stop - self.origin > self._room:
            fits = stop - _floor(self._kept_from(start)) <= self._room
            self._forget(self._kept_from(start if fits else stop), start)
        self.stop = stop
        dropped = max(0, self.first - start)
        return slice(start + dropped - self.origin, stop - self.origin), dropped

    def _forget(self, below: int, stop: int) -> None:
        """Move the rows of [below, stop), and those of the block that `below` is in, to the arrays' beginning."""
        origin = _floor(below)
        if origin < stop:
            for array in self._arrays:
                array[..., : stop - origin, :] = array[..., origin - self.origin : stop - self.origin, :]
        self.first, self.origin = below, origin


class ReferenceCache(LayeredCache[LayerCache]):
    """Keys and values of positions [0, length). Only the engine's thread touches it."""

    def __init__(self, spec: ModelSpec, derive: Derivation) -> None:
        self._shape, self._derive = PlaneShape(spec.kv_heads, spec.head_dim), derive
        layers = [LayerCache(self._shape, layer.window, spec.max_positions) for layer in spec.layers]
        super().__init__(layers, spec.max_positions)

    @property
    def arrays(self) -> list[mx.array]:
        """What to evaluate so that everything written is in memory."""
        return [array for layer in self._layers for array in layer.arrays]

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return sum(array.nbytes for array in self.arrays)

    def append(self, layer: int, rows: Rows) -> Seen:
        """Write one layer's rows after the last position; return the key blocks that queries there see.

        `length` stays until `commit`: the other layers need it.
        """
        self.reserve(self._length + rows.tokens)
        return self._layers[layer].append(self._length, rows)

    def install(self, layer: int, start: int, k: mx.array, v: mx.array) -> None:
        """Write planes `[tokens, kv_heads, head_dim]`, float16, at positions from `start`, and derive the integers.

        Those of a sliding layer may leave a gap that no later query sees. The planes are read when the
        cache is evaluated, so their memory must hold still until then.

        Raises:
            CacheError: another type or shape than this cache has.
        """
        check_planes(k, v, self._shape)
        self.reserve(start + k.shape[0])
        planes = mx.concatenate([k, v], axis=1).swapaxes(0, 1)
        self._layers[layer].write(start, self._derive.rows(planes))

    def planes(self, layer: int, start: int, stop: int) -> tuple[mx.array, mx.array]:
        """Return keys and values of [start, stop) as they travel: `[tokens, kv_heads, head_dim]`, float16.

        Raises:
            CacheError: they are not there, or not any more.
        """
        self.check_range(start, stop)
        rows = self._layers[layer].planes(start, stop).swapaxes(0, 1)
        return rows[:, : self._shape.kv_heads], rows[:, self._shape.kv_heads :]


def check_planes(k: mx.array, v: mx.array, shape: PlaneShape) -> None:
    """Check that planes are `[tokens, kv_heads, head_dim]`, float16.

    Raises:
        CacheError: they are not.
    """
    expected = (k.shape[0], shape.kv_heads, shape.head_dim)
    if k.shape != expected or v.shape != expected or not k.dtype == v.dtype == mx.float16:
        raise CacheError(f"planes {k.shape} and {v.shape}, {k.dtype}: expected {expected} in f16")


def cache_nbytes(spec: ModelSpec, positions: int) -> int:
    """Return the memory, in bytes, of a cache of so many positions: sliding layers have no more than they keep."""
    row_nbytes = PlaneShape(spec.kv_heads, spec.head_dim).row_nbytes
    capacity = -(-capacity_of(positions, spec.max_positions) // KEY_BLOCK) * KEY_BLOCK
    return sum(row_nbytes * min(capacity, most_rows(layer.window, spec.max_positions)) for layer in spec.layers)


def most_rows(window: int | None, most: int) -> int:
    """Return how many rows a layer ever keeps of a sequence of `most` positions: whole key blocks."""
    kept = most if window is None else min(most, window + SLACK_TOKENS + KEY_BLOCK)
    return -(-kept // KEY_BLOCK) * KEY_BLOCK


def _floor(position: int) -> int:
    return position // KEY_BLOCK * KEY_BLOCK
