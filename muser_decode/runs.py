"""What one run through the layers works on: the next tokens of one sequence, or one token of each of several.

In a step of several sequences all rows go through a layer's matrices together, and each attends over its own
cache, at its own position. A row is computed by the operations that it would have alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from muser_decode.attention import Rope, attention_of_chunk, attention_of_one
from muser_decode.engine.cache import KVCache
from muser_wire.model.spec import ModelSpec

Seen = list[tuple[mx.array, mx.array]]
"""For each sequence the keys and values that its queries see, each `[kv_heads, keys, head_dim]`."""


class Run(Protocol):
    """Rows of one run. Those of a layer are `[heads, rows, head_dim]`."""

    apart: bool
    """Whether they are of different requests."""

    def rotated(self, rope: Rope, x: mx.array) -> mx.array:
        """Return heads turned to their rows' positions."""

    def write(self, layer: int, rows: mx.array) -> Seen:
        """Append one layer's keys above its values, `[2 * kv_heads, rows, head_dim]`; return what is then seen."""

    def attended(self, layer: int, q: mx.array, seen: Seen) -> mx.array:
        """Return attention `[rows, heads * head_dim]` of one layer's queries."""

    def commit(self) -> None:
        """Declare the rows complete in every layer."""


class ChunkRun(Run):
    """The next `tokens` tokens of one cache's sequence."""

    apart = False

    def __init__(self, spec: ModelSpec, cache: KVCache, tokens: int) -> None:
        self._cache, self._start, self._stop = cache, cache.length, cache.length + tokens
        self._windows = [layer.window for layer in spec.layers]
        cache.reserve(self._stop)
        self._attend = {
            window: attention_of_chunk(self._start, tokens, window, spec.attention_scale)
            for window in set(self._windows)
        }

    def rotated(self, rope: Rope, x: mx.array) -> mx.array:
        """See `Run`."""
        return rope(x, self._start)

    def write(self, layer: int, rows: mx.array) -> Seen:
        """See `Run`."""
        return [self._cache.append(layer, rows)]

    def attended(self, layer: int, q: mx.array, seen: Seen) -> mx.array:
        """See `Run`."""
        return self._attend[self._windows[layer]](q, *seen[0])

    def commit(self) -> None:
        """See `Run`."""
        self._cache.commit(self._stop)


class StepRun(Run):
    """The next token of each of several caches' sequences, in this order."""

    def __init__(self, spec: ModelSpec, caches: Sequence[KVCache]) -> None:
        self._caches = caches
        self.apart = len(caches) > 1
        for cache in caches:
            cache.reserve(cache.length + 1)
        self._attend = attention_of_one(spec.attention_scale)
        self._positions = mx.array([cache.length for cache in caches]) if len(caches) > 1 else None

    def rotated(self, rope: Rope, x: mx.array) -> mx.array:
        """See `Run`."""
        return rope(x, self._caches[0].length) if self._positions is None else rope.each(x, self._positions)

    def write(self, layer: int, rows: mx.array) -> Seen:
        """See `Run`."""
        if self._positions is None:
            return [self._caches[0].append(layer, rows)]
        return [cache.append(layer, rows[:, at : at + 1]) for at, cache in enumerate(self._caches)]

    def attended(self, layer: int, q: mx.array, seen: Seen) -> mx.array:
        """See `Run`."""
        if self._positions is None:
            return self._attend(q, *seen[0])
        return mx.concatenate([self._attend(q[:, at : at + 1], *pair) for at, pair in enumerate(seen)])

    def commit(self) -> None:
        """See `Run`."""
        for cache in self._caches:
            cache.commit(cache.length + 1)
