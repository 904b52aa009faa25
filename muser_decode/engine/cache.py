"""The keys and values of one generation.

Each layer is one array `[2 * kv_heads, capacity, head_dim]`, keys first, in the compute type: one update
a layer and step, and every head's rows lie together as attention reads them. Updates are lazy; mlx
does them in place because nothing else refers to the array.
"""

from __future__ import annotations

import mlx.core as mx

from muser_decode.errors import CacheError
from muser_decode.numerics import KV_DTYPES
from muser_wire.geometry import ElementType
from muser_wire.model.spec import ModelSpec

GROWTH_TOKENS = 512
"""Capacity grows to the next multiple of this."""


class KVCache:
    """Keys and values of positions [0, length). Only the engine's thread touches it.

    `element` is the type to which the values are rounded, `dtype` the one that holds them.
    """

    def __init__(self, spec: ModelSpec, dtype: mx.Dtype, element: ElementType) -> None:
        self._kv_heads, self._head_dim = spec.kv_heads, spec.head_dim
        self._max_positions = spec.max_positions
        self._dtype, self._element = dtype, element
        self._layers = [mx.zeros((2 * spec.kv_heads, 0, spec.head_dim), dtype) for _ in spec.layers]
        self._capacity = 0
        self._length = 0

    @property
    def length(self) -> int:
        """Positions that are complete in every layer."""
        return self._length

    @property
    def capacity(self) -> int:
        """Positions for which there is memory."""
        return self._capacity

    @property
    def arrays(self) -> list[mx.array]:
        """What to evaluate so that everything written is in memory."""
        return self._layers

    def reserve(self, positions: int) -> None:
        """Make room for positions [0, positions), keeping what is there.

        Raises:
            CacheError: the model has fewer positions.
        """
        if positions <= self._capacity:
            return
        if positions > self._max_positions:
            raise CacheError(f"{positions} positions asked, the model has {self._max_positions}")
        steps = -(-positions // GROWTH_TOKENS)
        self._capacity = min(steps * GROWTH_TOKENS, self._max_positions)
        self._layers = [self._grown(layer) for layer in self._layers]

    def _grown(self, layer: mx.array) -> mx.array:
        grown = mx.zeros((2 * self._kv_heads, self._capacity, self._head_dim), self._dtype)
        if self._length:
            grown[:, : self._length] = layer[:, : self._length]
        return grown

    def append(self, layer: int, rows: mx.array) -> tuple[mx.array, mx.array]:
        """Write one layer's rows `[2 * kv_heads, tokens, head_dim]`, already rounded, after the last position.

        Returns keys and values of everything up to and including them, each `[kv_heads, keys, head_dim]`.
        `length` stays until `commit`: the other layers need it.
        """
        stop = self._length + rows.shape[1]
        self.reserve(stop)
        array = self._layers[layer]
        array[:, self._length : stop] = rows
        return array[: self._kv_heads, :stop], array[self._kv_heads :, :stop]

    def install(self, layer: int, start: int, k: mx.array, v: mx.array) -> None:
        """Write planes `[tokens, kv_heads, head_dim]` of the KV element type at positions from `start`.

        The planes are read when the cache is evaluated, so their memory must hold still until then.

        Raises:
            CacheError: another type or shape than this cache has.
        """
        expected = (k.shape[0], self._kv_heads, self._head_dim)
        if k.shape != expected or v.shape != expected or not k.dtype == v.dtype == KV_DTYPES[self._element]:
            raise CacheError(f"planes {k.shape} and {v.shape}, {k.dtype}: expected {expected} in {self._element.value}")
        stop = start + k.shape[0]
        self.reserve(stop)
        array = self._layers[layer]
        array[: self._kv_heads, start:stop] = k.transpose(1, 0, 2).astype(self._dtype)
        array[self._kv_heads :, start:stop] = v.transpose(1, 0, 2).astype(self._dtype)

    def commit(self, length: int) -> None:
        """Declare positions [0, length) complete in every layer."""
        if not self._length <= length <= self._capacity:
            raise CacheError(f"cannot commit {length} positions after {self._length}, with room for {self._capacity}")
        self._length = length

    def planes(self, layer: int, start: int, stop: int) -> tuple[mx.array, mx.array]:
        """Return keys and values of [start, stop) as they travel: `[tokens, kv_heads, head_dim]`, KV element type."""
        if not 0 <= start <= stop <= self._length:
            raise CacheError(f"positions {start} to {stop} asked, {self._length} are there")
        rows = self._layers[layer][:, start:stop].transpose(1, 0, 2).astype(KV_DTYPES[self._element])
        return rows[:, : self._kv_heads], rows[:, self._kv_heads :]
